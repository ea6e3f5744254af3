// The page of an experiment: its progress, buttons that cancel, resume and remove it, scores, and the comparison of cells.
import { base, fetchApi, sendJson } from './api.js';
import { openConfirmDialog } from './dialogs.js';
import { toast } from './dom.js';
import { LiveFragment } from './fragments.js';
import { listenForShortcuts } from './keys.js';
import { moveFocus } from './row-focus.js';

const grid = document.querySelector('[data-grid]');
const problem = document.querySelector('[data-problem]');
const bulk = document.querySelector('[data-bulk]');
const dialog = document.querySelector('[data-remove-dialog]');
const path = `/api/v1/experiments/${grid.dataset.experiment}`;

const isRunning = () => grid.querySelector('[data-part=progress]').dataset.state === 'running';
const liveGrid = new LiveFragment(grid, 'grid', showSelection);
liveGrid.follow(isRunning);

/** Awaits `act()`. If it fails, shows `failure` with the error. */
async function attempt(failure, act) {
  problem.hidden = true;
  try {
    await act();
  } catch (error) {
    problem.hidden = false;
    problem.textContent = `${failure}: ${error.message}`;
  }
}

/** Cancels or resumes the experiment; `name` is `cancel` or `resume`. */
async function changeState(name, button) {
  button.disabled = true;
  await attempt(name === 'cancel' ? 'Not cancelled' : 'Not resumed', async () => {
    await fetchApi(`${path}/${name}`, { method: 'POST' });
    await liveGrid.refresh();
    grid.querySelector('[data-part=progress] button')?.focus();
    toast(name === 'cancel' ? 'Experiment cancelled' : 'Experiment resumed');
  });
  button.disabled = false;
}

document.addEventListener('click', (event) => {
  const name = event.target.closest('[data-action]')?.dataset.action;
  if (name === 'cancel' || name === 'resume') changeState(name, event.target);
  else if (name === 'remove') remove();
});

/** Removes the experiment if the user confirms it. */
async function remove() {
  if (!await openConfirmDialog(dialog, 'remove')) return;
  await attempt('Not removed', async () => {
    await fetchApi(path, { method: 'DELETE' });
    location.assign(`${base}/experiments`);
  });
}

// Stores a score that the user types; an empty text removes the score.
grid.addEventListener('change', (event) => {
  const field = event.target;
  if (!field.matches('[data-score]')) return;
  attempt('Not scored', async () => {
    if (!field.validity.valid) throw new Error('a score is a number from 0 to 1');
    const score = field.value === '' ? null : Number(field.value);
    await sendJson(`${path}/cells/${Number(field.dataset.score) - 1}`, { score }, { method: 'PUT' });
    await liveGrid.refresh();
  });
});

// Selected cells are compared, with the first one as A.

/** Returns the ids of the runs of the selected cells. */
const selectedRuns = () => [...grid.querySelectorAll('[data-select]:checked')].map((checkbox) => checkbox.value);

function showSelection() {
  const [a, b, ...others] = selectedRuns();
  bulk.hidden = !a;
  bulk.querySelector('[data-bulk-text]').textContent = b ? `${others.length + 2} cells selected` : '1 cell selected; select another one to compare';
  const link = bulk.querySelector('[data-bulk-compare]');
  link.hidden = !b;
  if (b) link.href = `${base}/compare?${new URLSearchParams({ a, b, ...(others.length && { with: [b, ...others].join(',') }) })}`;
}
grid.addEventListener('change', showSelection);
// After Back, the browser checks the boxes again that were checked, by their names.
addEventListener('pageshow', showSelection);
bulk.querySelector('[data-bulk-clear]').addEventListener('click', () => {
  for (const checkbox of grid.querySelectorAll('[data-select]:checked')) checkbox.checked = false;
  showSelection();
});

listenForShortcuts(['experiments'], (action) => {
  const row = document.activeElement?.closest?.('tr');
  switch (action) {
    case 'nextRow': return moveFocus(grid, 1);
    case 'prevRow': return moveFocus(grid, -1);
    case 'create': location.assign(`${base}/experiments/-new`); return true;
    case 'select': {
      const checkbox = row?.querySelector('[data-select]');
      if (!checkbox) return false;
      checkbox.checked = !checkbox.checked;
      showSelection();
      return true;
    }
    case 'score': {
      const field = row?.querySelector('[data-score]');
      field?.focus();
      field?.select();
      return Boolean(field);
    }
    case 'compare': {
      const link = selectedRuns().length > 1 ? bulk.querySelector('[data-bulk-compare]') : row?.querySelector('[data-compare]');
      link?.click();
      return Boolean(link);
    }
    case 'escape':
      if (!selectedRuns().length) return false;
      bulk.querySelector('[data-bulk-clear]').click();
      return true;
    default: return false;
  }
});
