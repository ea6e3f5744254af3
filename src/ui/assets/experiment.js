// The page of an experiment: progress, cancel and resume, and the comparison of cells.
import { base, fetchApi, toast } from './dom.js';
import { listenForShortcuts } from './keys.js';
import { moveFocus, refresh, refreshWhile } from './refresh.js';

const place = document.querySelector('[data-grid]');
const problem = document.querySelector('[data-problem]');
const bulk = document.querySelector('[data-bulk]');
const dialog = document.querySelector('[data-remove-dialog]');
const path = `/api/v1/experiments/${place.dataset.experiment}`;

const isRunning = () => place.querySelector('[data-part=progress]').dataset.state === 'running';
refreshWhile(place, { fragment: 'grid', isRunning, changed: showSelection });

function fail(message) {
  problem.hidden = false;
  problem.textContent = message;
}

/** Calls a function. If it fails, shows the error after the text `failure`. */
async function attempt(failure, call) {
  problem.hidden = true;
  try {
    await call();
  } catch (error) {
    fail(`${failure}: ${error.message}`);
  }
}

async function act(name, button) {
  button.disabled = true;
  await attempt(name === 'cancel' ? 'Not cancelled' : 'Not resumed', async () => {
    await fetchApi(`${path}/${name}`, { method: 'POST' });
    await refresh(place, 'grid');
    place.querySelector('[data-part=progress] button')?.focus();
    toast(name === 'cancel' ? 'Experiment cancelled' : 'Experiment resumed');
  });
  button.disabled = false;
}

document.addEventListener('click', (event) => {
  const name = event.target.closest('[data-action]')?.dataset.action;
  if (name === 'cancel' || name === 'resume') act(name, event.target);
  else if (name === 'remove') dialog.showModal();
});
dialog.addEventListener('close', () => {
  if (dialog.returnValue !== 'remove') return;
  attempt('Not removed', async () => {
    await fetchApi(path, { method: 'DELETE' });
    location.assign(`${base}/experiments`);
  });
});

/** Stores a score that was typed in; an empty one removes it. */
place.addEventListener('change', (event) => {
  const box = event.target;
  if (!box.matches('[data-score]')) return;
  attempt('Not scored', async () => {
    if (!box.validity.valid) throw new Error('a score is a number from 0 to 1');
    const score = box.value === '' ? null : Number(box.value);
    await fetchApi(`${path}/cells/${Number(box.dataset.score) - 1}`, { method: 'PUT', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ score }) });
    await refresh(place, 'grid');
  });
});

// Selected cells are compared, with the first one as A.
const selected = () => [...place.querySelectorAll('[data-select]:checked')].map((box) => box.value);

function showSelection() {
  const [a, b, ...others] = selected();
  bulk.hidden = !a;
  bulk.querySelector('[data-bulk-text]').textContent = b ? `${others.length + 2} cells selected` : '1 cell selected; select another one to compare';
  const link = bulk.querySelector('[data-bulk-compare]');
  link.hidden = !b;
  if (b) link.href = `${base}/compare?${new URLSearchParams({ a, b, ...(others.length && { with: [b, ...others].join(',') }) })}`;
}
place.addEventListener('change', showSelection);
bulk.querySelector('[data-bulk-clear]').addEventListener('click', () => {
  for (const box of place.querySelectorAll('[data-select]:checked')) box.checked = false;
  showSelection();
});

listenForShortcuts(['experiments'], (action) => {
  const row = document.activeElement?.closest?.('tr');
  switch (action) {
    case 'nextRow': return moveFocus(place, 1);
    case 'prevRow': return moveFocus(place, -1);
    case 'create': location.assign(`${base}/experiments/-new`); return true;
    case 'select': {
      const box = row?.querySelector('[data-select]');
      if (!box) return false;
      box.checked = !box.checked;
      showSelection();
      return true;
    }
    case 'score': {
      const box = row?.querySelector('[data-score]');
      box?.focus();
      box?.select();
      return Boolean(box);
    }
    case 'compare': {
      const link = selected().length > 1 ? bulk.querySelector('[data-bulk-compare]') : row?.querySelector('[data-compare]');
      link?.click();
      return Boolean(link);
    }
    case 'escape':
      if (!selected().length) return false;
      bulk.querySelector('[data-bulk-clear]').click();
      return true;
    default: return false;
  }
});
