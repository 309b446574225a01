import fs from 'node:fs'
import path from 'node:path'
import { defineConfig } from 'vitepress'
import { anchor, commands, directories, heading, index, list, root } from '../documents.js'

// Links to what is no page of the site lead there.
const repository = process.env.REPOSITORY || 'https://github.com/kubevirt/hostpath-provisioner'
// The path that the site is served below.
const base = process.env.SITE_BASE || '/'

const logo = 'data:image/svg+xml;base64,' + fs.readFileSync(new URL('theme/logo.svg', import.meta.url), 'base64')

const rewrites = {
  'site/index.md': 'index.md',
  'README.md': 'start.md',
  'docs/README.md': 'docs/index.md',
  ...Object.fromEntries(directories.map((directory) => [`site/${directory}.md`, `${directory}/index.md`]))
}

// page is the page that shows a file or directory of the repository, if there is one.
function page(file) {
  if (directories.includes(file)) return `/${file}/`
  if (/^(docs\/.*|[A-Z]+)\.md$/.test(file)) return '/' + (rewrites[file] ?? file).replace(/(?<=^|\/)index\.md$/, '')
}

// resolve is where a link of a document leads on the site.
function resolve(href, document) {
  if (/^([a-z]+:|#)/.test(href)) return href
  const [target, ...hash] = href.split(/(?=#)/)
  const file = path.join(target.startsWith('/') ? '.' : path.dirname(document), target).replace(/^\/|\/$/g, '')
  const kind = fs.statSync(path.join(root, file)).isDirectory() ? 'tree' : 'blob'
  return (page(file) ?? `${repository}/${kind}/main/${file}`) + hash
}

// The documents indent their blocks, and name no language.
function language(block) {
  if (/^(apiVersion|[a-z]\w*):( [^ ]|\n)/.test(block)) return 'yaml'
  if (/^(kubectl|make|git|cd|ls|find|findmnt|mount|btrfs|xfs_quota|tune2fs|lsattr|losetup|dmesg|df|sed|grep|touch|nsenter) /.test(block)) return 'sh'
  return /^[[{]/.test(block) ? 'json' : 'text'
}

const repositoryToSite = (md) => md.core.ruler.push('repository', ({ tokens, env }) => {
  const document = path.relative(root, env.realPath ?? env.path)
  for (const token of tokens) {
    if (token.type === 'code_block') Object.assign(token, { type: 'fence', info: language(token.content) })
    token.children?.forEach((link, i, { [i + 1]: text }) => {
      if (link.type !== 'link_open') return
      const href = link.attrGet('href')
      link.attrSet('href', resolve(href, document))
      // The name of a file is none for a page.
      if (/^[a-z-]+\.md$/.test(text.content)) text.content = heading(path.join(path.dirname(document), href))
    })
  }
})

const item = (link) => ({
  text: link === 'README.md' ? 'Start here' : heading(link),
  link: resolve('/' + link),
  ...directories.includes(link) && { collapsed: true, items: list(link).map(item) }
})

// What documents are compiled to imports vue, which is not found from outside of site/.
const vueForDocuments = {
  name: 'vue-for-documents',
  enforce: 'pre',
  resolveId(id, importer, options) {
    return /^vue($|\/)/.test(id) && importer?.endsWith('.md') ? this.resolve(id, path.join(root, 'site/package.json'), options) : undefined
  }
}

export default defineConfig({
  title: 'hostpath-provisioner',
  description: 'Storage that is local to a Kubernetes node',
  lang: 'en',
  base,
  head: [['link', { rel: 'icon', href: logo }]],
  srcDir: root,
  srcExclude: ['!(docs|site)/**/*'],
  rewrites,
  outDir: '../bin/site',
  cacheDir: '../bin/site-cache',
  vite: { plugins: [vueForDocuments] },
  markdown: { anchor: { slugify: anchor }, config: repositoryToSite },
  themeConfig: {
    logo,
    nav: [
      { text: 'Start here', link: '/start' },
      { text: 'Documentation', link: '/docs/', activeMatch: '^/docs/' },
      { text: 'Changes', link: '/CHANGELOG' }
    ],
    sidebar: index().map(({ title, links }) => ({ text: title, items: links.map(item) })),
    outline: [2, 3],
    search: { provider: 'local' },
    socialLinks: [{ icon: 'github', link: repository }],
    editLink: { pattern: `${repository}/edit/main/:path` },
    install: commands('README.md', 'make release') + '\n# bring the images to the nodes, then in bin/release/v0.1.0\n' + commands('README.md', 'kubectl apply -f namespace.yaml')
  }
})
