// The playground: a form for a request of the public API, and the replay of the run that it starts.
import { base, sendJson } from './api.js';
import { copyText } from './dom.js';
import { listenForShortcuts } from './keys.js';
import { NextToken } from './playground/next-token.js';
import { formOfRun } from './playground/form-of-run.js';
import { Generation } from './playground/generation.js';
import { RequestForm } from './playground/request-form.js';
import { RunView } from './playground/run-view.js';
import { loadForm, storeForm } from './playground/stored-form.js';
import { starterButtons } from './playground/starters.js';
import { curlOf, missingInput, requestOf } from './playground/request.js';

const element = document.querySelector('[data-request-form]');
const runPane = document.querySelector('.run-pane');
const query = new URL(location).searchParams;
const form = new RequestForm(element, storeForm);

function showStatus(text) {
  element.querySelector('[data-state]').textContent = text;
}

/** Shows a problem below the buttons, or removes it if the text is empty. */
function showProblem(text) {
  const box = element.querySelector('[data-problem]');
  box.hidden = !text;
  box.textContent = text;
  if (text) box.scrollIntoView({ block: 'nearest' });
}

const runView = new RunView(runPane, {
  onProblem: showProblem,
  onConnection: (text, ok) => { if (!ok) showStatus(`Live view: ${text}.`); },
});

const generation = new Generation({
  onRun: (id, { model, attention }, ended) => runView.showNew(id, { hasAttention: Boolean(attention), vectors: form.vectorsOf(model), ended }),
  onStatus: showStatus,
  onProblem: showProblem,
  onBusy: (isBusy) => {
    element.querySelector('[data-action=stop]').disabled = !isBusy;
    element.querySelector('[data-action=generate]').ariaBusy = String(isBusy);
  },
});

const nextToken = new NextToken(element.querySelector('[data-next]'), form, showProblem);
element.addEventListener('input', ({ target }) => {
  if (target.matches('[data-raw], [name=model]')) nextToken.clear();
});

/** Calls `send(values)` with the values of the form. Shows what the form lacks, and errors. */
async function submit(send) {
  showProblem('');
  if (!form.isComplete()) return;
  const values = form.value;
  try {
    const reason = missingInput(values);
    if (reason) throw new Error(reason);
    await send(values);
  } catch (error) {
    showProblem(error.message);
  }
}

const generate = () => submit((values) => generation.start(requestOf(values)));

/** Shows the candidates of the next token. A chat is first rendered by the model's template. */
const computeNext = () => submit(async (values) => {
  if (values.tab === 'chat') {
    const response = await sendJson('/apply-template', requestOf(values).body);
    form.showText((await response.json()).prompt);
  }
  await nextToken.next();
});

/** Copies the request of the form as a shell command, even if the form is incomplete. */
function copyCurl() {
  try { copyText(curlOf(requestOf(form.value), location.origin + base, element.dataset.keyVariable), 'curl command'); } catch (error) { showProblem(error.message); }
}

element.addEventListener('submit', (event) => {
  event.preventDefault();
  generate();
});

const buttons = { stop: () => generation.stop(), computeNext, curl: copyCurl };
element.addEventListener('click', ({ target }) => buttons[target.closest('[data-action]')?.dataset.action]?.());

listenForShortcuts(['playground', 'replay'], (action, key) => {
  if (action === 'generate') { generate(); return true; }
  if (action === 'computeNext') { computeNext(); return true; }
  if (action === 'escape' || action === 'cancel') {
    if (!generation.isActive) return false;
    generation.stop();
    return true;
  }
  if (action === 'copy') {
    if (!runView.path) return false;
    copyText(location.origin + runView.path, 'link to the run');
    return true;
  }
  return runView.act(action, key);
});

/**
 * Fills the form from a run and shows its replay. If the query has an event (`?at=`), the form continues the text at that event,
 * with the text `?next=` after it. The mod `?mod=` is added.
 */
async function openRun(id) {
  const at = /^\d+$/.test(query.get('at') ?? '') ? Number(query.get('at')) : null;
  const { values, summary } = await formOfRun(id, { at, next: query.get('next') ?? '' });
  // The user may have started another run while this one was loaded.
  if (generation.isActive || runView.path) return;
  const mod = form.exampleOf(query.get('mod'));
  if (mod && !values.mods.some(({ name }) => name === mod.name)) values.mods.push(mod);
  form.value = values;
  const { model } = values;
  if (model && !form.hasModel(model)) {
    showProblem(`This server does not have the model “${model}” of the run; requests use ${form.value.model || 'its default model'}.`);
    form.showChangesFrom({ ...form.value, model });
  } else {
    form.showChangesFrom(form.value);
  }
  runView.showOriginal(id, { at, isLive: summary?.status === 'running', hasAttention: Boolean(summary?.has_attention), vectors: form.vectorsOf(model) });
}

/** Fills the form with the values of the last visit and the mod `?mod=`, and shows the starters. */
function openEmpty() {
  const name = query.get('mod');
  const mod = form.exampleOf(name);
  form.value = { ...loadForm(), ...(mod && { mods: [mod] }) };
  if (name && !mod) showProblem(`Unknown mod '${name}'.`);
  // The page has a warning while no model can answer.
  if (!form.value.model || document.querySelector('main > .banner.warn')) return;
  const starters = starterButtons(form.available, (values) => {
    form.change(values);
    generate();
  });
  if (starters) runPane.querySelector('[data-text]').append(starters);
}

const from = query.get('from');
if (from) {
  openRun(from).catch((error) => {
    form.value = loadForm();
    showProblem(`Loading run ${from} failed: ${error.message}.`);
  });
} else {
  openEmpty();
}

runPane.querySelector('[data-sample]')?.addEventListener('click', async ({ target }) => (await import('./sample.js')).openSample(target));
