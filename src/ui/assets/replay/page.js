// The page of a run: the replay, whose state the URL contains, and the actions on the run.
import { base } from '../api.js';
import { copyText, h, nextFrame, singleFlight, toast } from '../dom.js';
import { listenForShortcuts } from '../keys.js';
import { registerRunNavigation } from '../shell.js';
import { parametersOf } from './details.js';
import { Replay } from './replay.js';

const root = document.querySelector('[data-replay]');
/** Copy of the replay's element before a run is shown in it, for a branch beside the text. */
const emptyReplay = root.cloneNode(true);
const problem = document.querySelector('[data-problem]');
const params = new URL(location).searchParams;
const id = root.dataset.run;

const at = params.get('at');
/** The initial state of the replay. Existing links contain the names of the parameters, so they do not change. */
const state = {
  at: at !== null && /^\d+$/.test(at) ? Number(at) : null,
  ...(params.has('color') && { color: params.get('color') }),
  showRemoved: params.get('erased') === '1',
  showLater: params.get('ahead') !== '0',
  attention: params.has('attention'),
  attentionView: params.get('attention') || 'mean',
  laterSteps: params.has('later'),
};

/** Returns the URL of a page with a state of its replay, in which default values are omitted, and with a branch beside the text. */
function urlOf(replayState, path = location.pathname, branchId = branch?.id) {
  const query = new URLSearchParams();
  if (params.has('q')) query.set('q', params.get('q'));
  if (replayState.at !== null) query.set('at', replayState.at);
  if (replayState.color !== 'surprise') query.set('color', replayState.color);
  if (replayState.showRemoved) query.set('erased', '1');
  if (!replayState.showLater) query.set('ahead', '0');
  if (replayState.attention) query.set('attention', replayState.attentionView);
  if (replayState.attention && replayState.laterSteps) query.set('later', '1');
  if (branchId) query.set('beside', branchId);
  return query.toString() ? `${path}?${query}` : path;
}

let urlTimer = 0;

/** Updates the URL and the branch beside the text after a change of the replay's state. */
function stateChanged(newState) {
  branch?.follow(newState);
  clearTimeout(urlTimer);
  // Browsers limit the rate of URL changes, and a key that is held down would exceed it.
  urlTimer = setTimeout(() => history.replaceState(null, '', urlOf(newState)), 120);
}

/** The `Family` of the run, or null before it is loaded. */
let family = null;
/** The `BranchReplay` beside the text, or null. */
let branch = null;

/** Parameters of the recorded prompt. */
let parameters = { mods: [], steering: [] };

/** The button that cancels the run, which is enabled while the run is active; null if the run had ended when the page was opened. */
const cancelButton = document.querySelector('[data-action=cancel]');
const isActive = () => cancelButton?.disabled === false;

const tokenCount = document.querySelector('[data-run-tokens]');
/** Time of the next summary of a live run. */
let nextSummary = 0;

function showProblem(text, tone = 'err') {
  problem.className = `banner ${tone}`;
  problem.hidden = !text;
  problem.textContent = text;
}

const replay = new Replay(root, id, {
  state,
  isLive: root.dataset.status === 'running',
  hasAttention: root.dataset.attention === 'true',
  hooks: {
    changed: stateChanged,
    forked: (forks, change) => family?.forked(forks, change),
    prompt: (prompt) => {
      parameters = parametersOf(prompt);
      showParameters();
    },
    connection: (text, ok) => showProblem(ok ? '' : `Live view: ${text}.`, 'warn'),
    grown: (count) => {
      tokenCount.textContent = `${count} tok`;
      if (Date.now() < nextSummary) return;
      nextSummary = Date.now() + 1000;
      family?.summarize(replay.run);
    },
    ended: (summary) => {
      if (cancelButton) {
        // A disabled button cannot have the focus.
        if (cancelButton === document.activeElement) cancelButton.closest('details').querySelector('summary').focus();
        cancelButton.disabled = true;
      }
      reportMissingEvent();
      if (summary?.status) {
        const status = document.querySelector('[data-run-status]');
        status.textContent = summary.status;
        status.className = `status status-${summary.status}`;
        tokenCount.textContent = `${summary.completion_tokens ?? 0} tok`;
      }
      markAnnotations();
      family?.summarize(replay.run);
      // Finish reason, speed, and the banners of failed and cancelled runs.
      import('../fragments.js')
        .then(({ reloadContents }) => reloadContents(['[data-run-facts]', '[data-banners]'], 'The run has ended', showParameters))
        .catch((error) => toast(`The page could not be updated: ${error.message}`));
    },
  },
});

registerRunNavigation((place) => replay.visit(place));
showRun().catch((error) => showProblem(`The run could not be loaded: ${error.message}.`));

async function showRun() {
  await replay.open();
  if (!replay.isLive) reportMissingEvent();
  markAnnotations();
  await nextFrame();
  await showFamily();
}

/** Shows a notification if the run, which has ended, lacks the event in the URL, unless the user has moved to another one. */
function reportMissingEvent() {
  const count = replay.run.eventCount;
  const isMissing = state.at === null || state.at > count;
  if (at !== null && isMissing && replay.state.at === state.at) toast(`Event ${at} does not exist; the run has ${count} event${count === 1 ? '' : 's'}`);
}

/** Shows what the run's summary lacks: the versions of the mods, and the control vectors. */
function showParameters() {
  linkMods(parameters.mods);
  showSteering(parameters.steering);
}

/** Makes the names of the mods links to the versions that the run used. */
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

/** Shows the family of the run, its forks and the runs from which it was forked, below its text. */
async function showFamily() {
  const [{ Family }, { BranchReplay }] = await Promise.all([import('./family.js'), import('./branch-replay.js')]);
  family = new Family(id, {
    urlOf: (member) => {
      const forkedAt = member.status === 'running' ? null : member.parent?.sequence_order ?? null;
      return urlOf({ ...replay.state, at: forkedAt }, `${base}/runs/${member.run_id}`, null);
    },
    select: (row) => replay.select(row),
    notForkable: (reason) => { replay.notForkable = reason; },
    showBeside: (member) => {
      branch?.close();
      branch = member && new BranchReplay(emptyReplay, root, member, replay.state, () => family.showBeside(null));
      stateChanged(replay.state);
    },
  });
  root.querySelector('[data-panel]').before(family.section);
  family.summarize(replay.run);
  await family.load();
  document.querySelector('nav.family')?.toggleAttribute('hidden', family.isLoaded);
  if (params.has('beside')) family.showBeside(params.get('beside'));
}

/** Performs an action of `run-actions.js`, whose code is loaded on first use. */
const actOnRun = singleFlight((name) => import('./run-actions.js').then(({ runActions }) => runActions[name](id, isActive))
  .catch((error) => toast(`The action could not be loaded: ${error.message}`)));

/** Marks the tokens with notes and feedback in the replay, and makes their places in the lists buttons that go to the tokens. */
function markAnnotations() {
  const lines = [...document.querySelectorAll('[data-notes] [data-position], [data-feedback] [data-position]')];
  replay.annotations = lines.map((line) => ({
    token: Number(line.dataset.position), tone: line.dataset.tone, text: line.textContent.replace(/\s+/g, ' ').trim(),
  }));
  const answerLength = replay.run?.answer().length ?? 0;
  for (const line of lines) {
    const token = Number(line.dataset.position);
    const place = line.querySelector('span[data-place]');
    if (!place || token >= answerLength) continue;
    place.replaceWith(h('button', { type: 'button', class: 'link', 'data-place': true, onclick: () => replay.visit({ token: token + 1 }) }, place.textContent));
  }
}

/** Promise of the function that opens the feedback form; null before the first use. */
let openFeedbackForm = null;

/** Opens the feedback form for the selected token. Its code is loaded on first use. */
function giveFeedback() {
  openFeedbackForm ??= import('./feedback.js').then(({ setUpFeedbackForm }) => setUpFeedbackForm(id, markAnnotations));
  openFeedbackForm.then((open) => open(replay.token), (error) => {
    openFeedbackForm = null;
    toast(`The form could not be loaded: ${error.message}`);
  });
}

/** Opens the note on the selected token, or else on the run. */
const writeNote = singleFlight(() => import('./notes.js').then(({ editNote }) => editNote(id, replay.token ?? -1, markAnnotations)).catch((error) => toast(`The notes could not be loaded: ${error.message}`)));

/** Opens the dialog for the tags of the run. */
const changeTags = singleFlight(async () => {
  const element = () => document.querySelector('[data-tags]');
  const { editTags, tagLinks, tagsIn } = await import('../tags.js');
  editTags([{ id, tags: tagsIn(element()) }], ([run]) => element().replaceChildren(...tagLinks(run.tags)));
});

/** Clicks the link with a selector. Returns false if the page has none. */
const clickLink = (selector) => {
  const link = document.querySelector(selector);
  link?.click();
  return Boolean(link);
};

/** Performs an action of a shortcut or button. Returns false if there is no such action. */
function act(action, key) {
  switch (action) {
    case 'copy':
      clearTimeout(urlTimer);
      history.replaceState(null, '', urlOf({ ...replay.state, at: replay.atEnd ? null : replay.n }));
      copyText(location.href, 'link');
      return true;
    case 'cancel': case 'delete': actOnRun(action); return true;
    case 'feedback': giveFeedback(); return true;
    case 'note': writeNote(); return true;
    case 'tags': changeTags(); return true;
    case 'nextBranch': case 'prevBranch': {
      const href = family?.urlOfNext(action === 'nextBranch' ? 1 : -1);
      if (href) location.assign(href);
      else toast('This run has no branches.');
      return true;
    }
    case 'nextRun': return clickLink('[data-next]');
    case 'prevRun': return clickLink('[data-prev]');
    case 'openPlayground': {
      const href = replay.atEnd ? null : replay.playgroundUrl();
      if (href) location.assign(href);
      return href ? true : clickLink('[data-again]');
    }
    case 'escape': {
      const menu = document.querySelector('details.more[open]');
      if (menu) {
        menu.open = false;
        menu.querySelector('summary').focus();
      } else document.activeElement?.blur?.();
      return true;
    }
    default: return replay.act(action, key);
  }
}

listenForShortcuts(['replay'], act);
document.querySelector('.run-actions').addEventListener('click', (event) => {
  const button = event.target.closest('[data-action]');
  if (button) act(button.dataset.action);
});
