import { directories, heading, list } from '../documents.js'

export default {
  paths: () => directories.map((directory) => ({
    params: { list: directory.replace('docs/', '') },
    content: `# ${heading(directory)}\n\n` + list(directory).map((page) => `- [${heading(page)}](/${page})`).join('\n')
  }))
}
