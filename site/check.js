// Opens every page of bin/site in Chromium as a reader has it, and fails with the list of what is wrong.
import fs from 'node:fs'
import http from 'node:http'
import path from 'node:path'
import puppeteer from 'puppeteer-core'
import { root } from './documents.js'

const site = path.join(root, 'bin/site')
const shots = path.join(root, 'bin/site-shots')
const base = process.env.SITE_BASE || '/'
const widths = [1280, 360]
const schemes = ['light', 'dark']
const types = { '.html': 'text/html', '.css': 'text/css', '.js': 'text/javascript', '.png': 'image/png', '.woff2': 'font/woff2' }

const server = http.createServer((request, response) => {
  const { pathname } = new URL(request.url, 'http://site')
  const file = path.join(site, decodeURI(pathname.slice(base.length)).replace(/(^|\/)$/, '$1index.html'))
  if (!pathname.startsWith(base) || !fs.existsSync(file)) return response.writeHead(404).end()
  response.writeHead(200, { 'Content-Type': types[path.extname(file)] ?? 'application/octet-stream' })
  fs.createReadStream(file).pipe(response)
})
await new Promise((listening) => server.listen(0, '127.0.0.1', listening))
const origin = `http://127.0.0.1:${server.address().port}`

const ids = {}
const links = {}
const problems = new Set()

function fault(what) {
  if (!problems.has(what)) console.log('  ' + what)
  problems.add(what)
}

async function open(tab, name) {
  tab.report = (what) => fault(`${name} (${tab.viewport().width} pixels): ${what}`)
  await tab.goto(origin + base + name)
  await tab.waitForFunction(() => document.querySelector('#app').__vue_app__)
}

// The site follows the system while it is open.
async function paint(tab, scheme) {
  await tab.emulateMediaFeatures([{ name: 'prefers-color-scheme', value: scheme }])
  await tab.waitForFunction((dark) => document.documentElement.classList.contains('dark') === dark, {}, scheme === 'dark')
}

async function look(tab, name) {
  await open(tab, name)
  for (const scheme of schemes) {
    await paint(tab, scheme)
    const wide = await tab.evaluate(async () => {
      for (const image of document.images) {
        image.loading = 'eager'
        await image.decode()
      }
      const { scrollWidth, clientWidth } = document.documentElement
      return scrollWidth > clientWidth && [...document.querySelectorAll('.vp-doc *')]
        .filter((e) => e.getBoundingClientRect().right > clientWidth + 1).map((e) => e.textContent.trim().slice(0, 60)).slice(0, 3)
    })
    if (wide) tab.report(`${scheme}: wider than the screen: ${JSON.stringify(wide)}`)
  }
  ids[name] = new Set(await tab.$$eval('[id]', (all) => all.map((e) => e.id)))
  links[name] = await tab.$$eval('a[href]', (all) => all.map((a) => a.href))
}

// What is on the start page only, or works by a script.
async function start(tab) {
  await open(tab, 'index.html')
  const shows = (text) => tab.waitForFunction((t) => document.querySelector('.ap-term')?.textContent.includes(t), {}, text)
  await shows('Nothing was left behind.')
  fs.mkdirSync(shots, { recursive: true })
  for (const scheme of schemes) {
    await paint(tab, scheme)
    await tab.$eval('img[loading]', (image) => { image.loading = 'eager'; return image.decode() })
    await tab.screenshot({ path: path.join(shots, `start-${tab.viewport().width}-${scheme}.png`), fullPage: true })
  }
  await tab.click('.ap-overlay-start')
  await tab.waitForFunction(() => !document.querySelector('.ap-overlay-start'))
  await shows('Nothing was left behind.')
  await tab.click('.VPNavBarSearch button')
  await tab.waitForSelector('#localsearch-input')
  await tab.type('#localsearch-input', 'overprovision')
  await tab.waitForSelector('.VPLocalSearchBox .result[href*="capacity.html"]')
}

function checkLinks() {
  let count = 0
  for (const [name, hrefs] of Object.entries(links)) {
    for (const href of hrefs) {
      const url = new URL(href)
      if (url.origin !== origin) continue
      count++
      const to = decodeURI(url.pathname.slice(base.length)).replace(/(^|\/)$/, '$1index.html')
      const id = decodeURIComponent(url.hash.slice(1))
      if (!ids[to]) fault(`${name}: no page ${to}`)
      else if (id && !ids[to].has(id)) fault(`${name}: no heading ${to}#${id}`)
    }
  }
  return count
}

const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM || '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync']
})
try {
  const tab = await browser.newPage()
  tab.setDefaultTimeout(120_000)
  tab.on('console', (message) => ['error', 'warn'].includes(message.type()) && tab.report(message.text()))
  tab.on('pageerror', (error) => tab.report(error.message))
  tab.on('requestfailed', (request) => tab.report(`${request.url()}: ${request.failure().errorText}`))
  tab.on('request', (request) => /^(data|blob):/.test(request.url()) || request.url().startsWith(origin) || tab.report(`asks ${request.url()}`))
  tab.on('response', (response) => response.status() >= 400 && tab.report(`${response.url()}: ${response.status()}`))

  const pages = fs.readdirSync(site, { recursive: true }).filter((name) => name.endsWith('.html') && name !== '404.html').sort()
  for (const width of widths) {
    await tab.setViewport({ width, height: 900 })
    await start(tab)
    for (const name of pages) await look(tab, name)
  }
  const count = checkLinks()
  console.log(`${pages.length} pages, each at ${widths.length} widths, light and dark; ${count} links; ${problems.size} problems`)
  if (pages.length < 50 || count < 1000) throw new Error('that is not the whole site')
} finally {
  await browser.close()
  server.close()
}
process.exitCode = problems.size > 0 ? 1 : 0
