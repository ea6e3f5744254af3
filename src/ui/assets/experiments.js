// The page with the list of experiments: shortcuts, and the progress of running experiments.
import { base } from './api.js';
import { LiveFragment } from './fragments.js';
import { listenForShortcuts } from './keys.js';
import { moveFocus } from './row-focus.js';

const list = document.querySelector('[data-list]');

new LiveFragment(list, 'list').follow(() => list.querySelector('tr[data-state=running]'));

listenForShortcuts(['experiments'], (action) => {
  if (action === 'nextRow') return moveFocus(list, 1);
  if (action === 'prevRow') return moveFocus(list, -1);
  if (action !== 'create') return false;
  location.assign(`${base}/experiments/-new`);
  return true;
});
