// The page of one run: the replay component and the URL of its state.
import { base, copyText, fetchApi, h, toast } from '../dom.js';
import { listenForShortcuts } from '../keys.js';
import { Replay } from './replay.js';
import { registerRunNavigation } from '../shell.js';

const root = document.querySelector('[data-replay]');
const unusedCopy = root.cloneNode(true);
const problem = document.querySelector('[data-problem]');
const params = new URL(location).searchParams;
const id = root.dataset.run;

const at = params.get('at');
const state = {
  at: at !== null && /^\d+$/.test(at) ? Number(at) : null,
  ...(params.has('color') && { color: params.get('color') }),
  showRemoved: params.get('erased') === '1',
  showLater: params.get('ahead') !== '0',
  attention: params.has('attention'),
  attentionView: params.get('attention') || 'mean',
  laterSteps: params.has('later'),
};

/** Returns the URL of a state without defaults. */
function urlOf(s, path = location.pathname, besideId = beside?.id) {
  const next = new URLSearchParams();
  if (params.has('q')) next.set('q', params.get('q'));
  if (s.at !== null) next.set('at', s.at);
  if (s.color !== 'surprise') next.set('color', s.color);
  if (s.showRemoved) next.set('erased', '1');
  if (!s.showLater) next.set('ahead', '0');
  if (s.attention) next.set('attention', s.attentionView);
  if (s.attention && s.laterSteps) next.set('later', '1');
  if (besideId) next.set('beside', besideId);
  const query = next.toString();
  return `${path}${query ? `?${query}` : ''}`;
}

let timer = 0;

/** Keeps the URL and a branch beside the text up to date with the state. */
function changed(s) {
  beside?.follow(s);
  clearTimeout(timer);
  // Browsers limit the rate of URL changes, and a key that is held down would exceed it.
  timer = setTimeout(() => history.replaceState(null, '', urlOf(s)), 120);
}

let family = null;
let beside = null;

const tokenCount = document.querySelector('[data-run-tokens]');

function showProblem(text, tone = 'err') {
  problem.className = `banner ${tone}`;
  problem.hidden = !text;
  problem.textContent = text;
}

const replay = new Replay(root, id, {
  state,
  live: root.dataset.status === 'running',
  hasAttention: root.dataset.attention === 'true',
  hooks: {
    changed,
    forked: (forks, change) => family?.forked(forks, change),
    prompt: ({ parameters }) => {
      linkMods(parameters?.mods ?? []);
      showSteering(parameters?.steering ?? []);
    },
    connection: (text, ok) => showProblem(ok ? '' : `Live view: ${text}.`, 'warn'),
    grown: (count) => { tokenCount.textContent = `${count} tok`; },
    ended: (summary) => {
      const status = document.querySelector('[data-run-status]');
      if (summary?.status) {
        status.textContent = summary.status;
        status.className = `status status-${summary.status}`;
        tokenCount.textContent = `${summary.completion_tokens ?? 0} tok`;
        if (summary.status === 'failed') showProblem(summary.message ?? 'The run failed.');
      }
      if (replay.run) family?.summarize(replay.run);
    },
  },
});

registerRunNavigation((place) => replay.visit(place));
replay.open().then(() => { markAnnotations(); return painted(); }).then(showFamily).catch((error) => showProblem(`The run could not be loaded: ${error.message}.`));

/** Waits until the browser has painted the next frame. */
function painted() { return new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve))); }

/** Links the mods of the run to the versions that it used. */
function linkMods(mods) {
  const spans = document.querySelectorAll('.facts span.mod');
  mods.forEach(({ name, version, origin }, i) => {
    if (!version || spans[i]?.textContent !== name) return;
    const query = origin === 'builtin' ? '' : `?${new URLSearchParams({ version })}`;
    spans[i].replaceWith(h('a', { class: 'mod', href: `${base}/mods/${encodeURIComponent(name)}${query}`, title: `Version ${version.slice(0, 12)}` }, name));
  });
}

/** Shows the control vectors of the run. */
function showSteering(vectors) {
  if (!vectors.length || document.querySelector('[data-steering]')) return;
  const title = vectors.map(({ name, layers }) => `${name}: layers ${layers?.join('-')}`).join('\n');
  const text = vectors.map(({ name, scale }) => `${name} ${scale}`).join(', ');
  document.querySelector('.facts [data-tags]')?.before(h('span', { title, 'data-steering': '' }, `steering ${text}`));
}

/** Shows the family of the run below its text. */
async function showFamily() {
  const [{ Family }, { Beside }] = await Promise.all([import('./family.js'), import('./beside.js')]);
  family = new Family(id, {
    urlOf: (m) => urlOf({ ...replay.state, at: m.status === 'running' || !m.parent ? null : m.parent.sequence_order }, `${base}/runs/${m.run_id}`, null),
    go: (row) => replay.select(row),
    refused: (reason) => { replay.refusal = reason; },
    beside: (other) => {
      beside?.close();
      beside = other && new Beside(unusedCopy, root, other, replay.state, () => family.beside(null));
    },
    changed: () => changed({ ...replay.state }),
  });
  root.querySelector('[data-panel]').before(family.section);
  family.summarize(replay.run);
  await family.load();
  document.querySelector('nav.family')?.toggleAttribute('hidden', family.isLoaded);
  if (params.has('beside')) family.beside(params.get('beside'));
}

const dialog = document.querySelector('[data-delete-dialog]');
dialog.addEventListener('close', async () => {
  if (dialog.returnValue !== 'delete') return;
  try {
    await fetchApi('/api/v1/deletions', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ runs: [id] }) });
    location.assign(`${base}/runs${params.has('q') ? `?${new URLSearchParams({ q: params.get('q') })}` : ''}`);
  } catch (error) {
    toast(`Not deleted: ${error.message}`);
  }
});

/** Marks the tokens with notes or feedback, and links to them. */
function markAnnotations() {
  const entries = [...document.querySelectorAll('[data-notes] [data-position], [data-feedback] [data-position]')].map((line) => ({
    line, token: Number(line.dataset.position), tone: line.dataset.tone, text: line.textContent.replace(/\s+/g, ' ').trim(),
  }));
  replay.annotations = entries;
  for (const { line, token } of entries) {
    const place = token < replay.run.answerLength(replay.run.eventCount) && line.querySelector('span[data-place]');
    if (!place) continue;
    place.replaceWith(h('button', { type: 'button', class: 'link', 'data-place': true, onclick: () => replay.visit({ token: token + 1 }) }, place.textContent));
  }
}

/** Promise of the function that opens the feedback form, or null before the first use. */
let feedback = null;

/** Opens the feedback form, whose code is loaded on first use. */
function giveFeedback() {
  feedback ??= import('./feedback.js').then((module) => module.feedback(id, markAnnotations));
  feedback.then((give) => give(replay.token), (error) => {
    feedback = null;
    toast(`The form could not be loaded: ${error.message}`);
  });
}

/** Opens the note on the selected token, or on the run. */
const writeNote = () => import('./notes.js').then(({ editNote }) => editNote(id, replay.token ?? -1, markAnnotations)).catch((error) => toast(`The notes could not be loaded: ${error.message}`));

/** Opens the run's tags. */
async function changeTags() {
  const place = document.querySelector('[data-tags]');
  const tags = await import('../tags.js');
  tags.editTags([{ id, tags: tags.tagsIn(place) }], ([run]) => place.replaceChildren(...tags.tagLinks(run.tags)));
}

/** Clicks a link; returns false if the page has none. */
const clickLink = (selector) => {
  const link = document.querySelector(selector);
  link?.click();
  return Boolean(link);
};

/** Performs an action of the key table; returns false for actions of other components. */
function act(action, key) {
  switch (action) {
    case 'copy':
      clearTimeout(timer);
      history.replaceState(null, '', urlOf({ ...replay.state, at: replay.atEnd ? null : replay.n }));
      copyText(location.href, 'link');
      return true;
    case 'delete': dialog.returnValue = ''; dialog.showModal(); return true;
    case 'feedback': giveFeedback(); return true;
    case 'note': writeNote(); return true;
    case 'tags': changeTags(); return true;
    case 'nextBranch': case 'prevBranch': {
      const href = family?.next(action === 'nextBranch' ? 1 : -1);
      if (href) location.assign(href);
      else toast('This run has no branches.');
      return true;
    }
    case 'nextRun': return clickLink('[data-next]');
    case 'prevRun': return clickLink('[data-prev]');
    case 'fork': {
      const href = replay.atEnd ? null : replay.fork();
      if (href) location.assign(href);
      return href ? true : clickLink('[data-again]');
    }
    case 'escape': document.activeElement?.blur?.(); document.querySelector('details.more[open]')?.removeAttribute('open'); return true;
    default: return replay.act(action, key);
  }
}

listenForShortcuts(['replay'], act);
document.querySelector('.run-actions').addEventListener('click', (event) => {
  const button = event.target.closest('[data-action]');
  if (button) act(button.dataset.action);
});
