// The page of an exported run: a replay without a server, of items that the page itself contains.
import { listenForShortcuts } from '../keys.js';
import { parseItems } from './events.js';
import { Fold } from './fold.js';
import { Images } from './images.js';
import { Replay } from './replay.js';

/** Returns the items in a text: lines of JSON, compressed by gzip and encoded as base64. */
export async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const lines = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).text();
  return parseItems(lines);
}

async function showRun(root) {
  // The file does not contain the attention of the run.
  root.querySelector('[data-action=attention]').hidden = true;
  const replay = new Replay(root, '', { hooks: { images: () => ({ Images }) } });
  const items = document.querySelector('[data-items]');
  replay.showLocal(new Fold({ hasSpecifiedActions: 'specifiedActions' in items.dataset }), await unpack(items.textContent));
  listenForShortcuts(['replay'], (action, key) => action !== 'attention' && replay.act(action, key));
}

const root = globalThis.document?.querySelector('[data-replay]');
if (root) {
  showRun(root).catch((error) => {
    const problem = document.querySelector('[data-problem]');
    problem.hidden = false;
    problem.textContent = `The run could not be shown: ${error.message}.`;
  });
}
