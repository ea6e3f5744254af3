// The page of an exported run: the replay of items that the page itself contains, without a server.
import { listenForShortcuts } from '../keys.js';
import { RunState } from './fold.js';
import { Images } from './images.js';
import { Replay } from './replay.js';

/** Unpacks items: base64 of gzipped lines of JSON. */
export async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const lines = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).text();
  return lines.split('\n').filter(Boolean).map((line) => JSON.parse(line));
}

async function start(root) {
  // Attention is not part of the file.
  root.querySelector('[data-action=attention]').hidden = true;
  const view = new Replay(root, '', { hooks: { images: () => ({ Images }) } });
  view.showLocal(new RunState(), await unpack(document.querySelector('[data-items]').textContent));
  listenForShortcuts(['replay'], (action, key) => action !== 'attention' && view.act(action, key));
}

const root = globalThis.document?.querySelector('[data-replay]');
if (root) {
  start(root).catch((error) => {
    const problem = document.querySelector('[data-problem]');
    problem.hidden = false;
    problem.textContent = `The run could not be shown: ${error.message}.`;
  });
}
