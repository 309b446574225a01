// What the site takes from the documents, so that nothing of them is written twice.
import fs from 'node:fs'
import path from 'node:path'
import { fileURLToPath } from 'node:url'

export const root = fileURLToPath(new URL('..', import.meta.url))

// Documents link to these. The site has a page for each, with a list of what is in it.
export const directories = ['docs/decisions', 'docs/runbooks']

const read = (file) => fs.readFileSync(path.join(root, file), 'utf8')

// list has the documents of a directory, by their paths from the root of the repository.
export const list = (directory) => fs.readdirSync(path.join(root, directory))
  .filter((name) => name.endsWith('.md')).sort().map((name) => `${directory}/${name}`)

// anchor is the one that GitHub gives a heading.
export const anchor = (text) => text.trim().toLowerCase().replace(/[^\p{L}\p{N}_ -]/gu, '').replaceAll(' ', '-')

// heading is what a link leads to: the heading with its anchor, or the title of the document.
export function heading(link) {
  if (directories.includes(link)) return path.basename(link).replace(/^./, (first) => first.toUpperCase())
  const [file, hash] = link.split('#')
  const found = [...read(file).matchAll(/^#+ (.*)$/gm)].map((match) => match[1].replaceAll('`', ''))
    .find((text) => !hash || anchor(text) === hash)
  if (!found) throw new Error(`${link}: no such heading`)
  return found
}

// index is docs/README.md, by section: what its lists link to.
export const index = () => read('docs/README.md').split(/^## /m).slice(1).map((section) => ({
  title: section.split('\n', 1)[0],
  links: [...section.matchAll(/\]\((.+?)\)/g)].map((match) => path.join('docs', match[1]))
})).filter(({ links }) => links.length > 0)

// commands is the block of a document that begins with a command.
export function commands(file, begin) {
  const block = read(file).split('\n\n').find((part) => part.startsWith(`    ${begin}`))
  if (!block) throw new Error(`${file}: no block begins with ${begin}`)
  return block.replace(/^ {4}/gm, '').trimEnd()
}
