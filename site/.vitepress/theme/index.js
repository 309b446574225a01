import { h } from 'vue'
import DefaultTheme from 'vitepress/theme'
import Start from './Start.vue'
import './style.css'

export default { extends: DefaultTheme, Layout: () => h(DefaultTheme.Layout, null, { 'home-hero-before': () => h(Start) }) }
