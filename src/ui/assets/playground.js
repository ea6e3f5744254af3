// The playground: a form for a request of the public API, and the replay of the run that it starts.
import { base, copyText, errorOf, fetchApi, fetchUrl, h, sendJson, toast } from './dom.js';
import { listenForShortcuts } from './keys.js';
import { NextToken } from './next-token.js';
import { Run } from './replay/run.js';
import { Replay } from './replay/replay.js';
import { registerRunNavigation } from './shell.js';
import { starterButtons } from './starters.js';
import { SteeringField } from './steering.js';
import { curlOf, differences, extraFields, formOf, missingInput, requestOf } from './request.js';

/** Key of the form's values in `localStorage`. */
const STORAGE_KEY = 'thunder.playground';
const ROLES = ['system', 'user', 'assistant'];

const form = document.querySelector('[data-request-form]');
const replayBox = document.querySelector('[data-replay]');
const status = document.querySelector('[data-state]');
const problemBox = document.querySelector('[data-problem]');
/** The line above the replay, with a link to the shown run. */
const runLine = document.querySelector('[data-run-line]');
const messages = document.querySelector('[data-messages]');
const raw = document.querySelector('[data-raw]');
const mods = document.querySelector('[data-mods]');
const stopButton = form.querySelector('[data-action=stop]');
const tabs = [...form.querySelectorAll('[role=tab]')];
const changedFields = document.querySelector('[data-changed-fields]');
const nextTokenBox = document.querySelector('[data-next]');
/** The control vectors of the server, or null. */
const vectors = JSON.parse(replayBox.dataset.vectors ?? 'null');
const steering = new SteeringField(vectors ?? { names: [], layers: 0 }, 'Select control vectors', () => save());
form.elements.lens.closest('label').after(steering.element);

/** The shown replay, or null. */
let replay = null;
/** AbortController of the request that generates, or null. */
let activeRequest = null;
/** Id of the shown run, or null. */
let shownRun = null;
/** Values of the form for the run with which the page was opened (`?from=`), or null. */
let originalForm = null;

// The form.

/** Removes a message or mod. The focus moves to the button of a neighbor, or to the one of `addAction`. */
function removeRow(row, addAction) {
  const neighbor = row.nextElementSibling ?? row.previousElementSibling;
  (neighbor?.querySelector('[title^=Remove]') ?? form.querySelector(`[data-action=${addAction}]`)).focus();
  row.remove();
  save();
}

/** Adds a message to the chat. `more` are its other fields, such as tool calls, which the form shows but cannot change. */
function addMessage({ role = 'user', content = '', more } = {}) {
  const number = messages.children.length + 1;
  const row = h('li', { class: 'message' },
    h('header', {},
      h('select', { 'aria-label': `Role of message ${number}` }, ROLES.map((r) => h('option', { value: r }, r))),
      h('button', { type: 'button', title: 'Remove this message', onclick: () => removeRow(row, 'addMessage') }, '✕', h('span', { class: 'visually-hidden' }, ' Remove message'))),
    h('textarea', { rows: '2', 'aria-label': `Message ${number}`, placeholder: role === 'system' ? 'Instructions for the model' : 'Message…' }),
    more ? h('details', { class: 'hint' }, h('summary', {}, Object.keys(more).join(', ')), h('pre', { class: 'trace', tabindex: '0' }, JSON.stringify(more, null, 2))) : null);
  row._more = more;
  if (!ROLES.includes(role)) row.querySelector('select').append(h('option', { value: role }, role));
  row.querySelector('select').value = role;
  row.querySelector('textarea').value = content;
  messages.append(row);
  return row;
}

/** Returns the list of the fields of a mod's configuration, or null if its schema has none. */
function configurationFields(schema) {
  const fields = Object.entries(schema?.properties ?? {});
  if (!fields.length) return null;
  const required = new Set(schema.required ?? []);
  return h('details', { class: 'hint' }, h('summary', {}, 'Fields'),
    h('dl', {}, fields.flatMap(([name, field]) => [
      h('dt', {}, h('code', {}, name), required.has(name) ? ' (required)' : 'default' in field ? ` = ${JSON.stringify(field.default)}` : ''),
      h('dd', {}, field.description ?? '', field.enum ? ` One of ${field.enum.join(', ')}.` : ''),
    ])));
}

/** Returns the option of a model with that name, or null. */
const optionOfModel = (name) => [...form.elements.model.options].find((option) => JSON.parse(option.dataset.names).includes(name)) ?? null;

/** Returns the option of a mod in the list of available mods, or null. */
const optionOf = (name) => form.querySelector(`[data-add-mod] option[value="${CSS.escape(name)}"]`);

/** Returns the example configuration of a mod's option. */
const exampleConfig = (option) => (option.dataset.config === 'null' ? '' : option.dataset.config);

/** Adds a mod to the list of the request's mods. */
function addMod({ name, config = '' }) {
  const option = optionOf(name);
  // `randomUUID` needs a secure context.
  const id = `mod-${crypto.randomUUID?.() ?? Math.random()}`;
  const problem = h('p', { class: 'err', role: 'status' });
  const text = h('textarea', { id, rows: '1', spellcheck: 'false', placeholder: 'no configuration', value: config });
  const check = () => {
    problem.textContent = '';
    try { if (text.value.trim()) JSON.parse(text.value); } catch (error) { problem.textContent = error.message; }
    text.setAttribute('aria-invalid', String(Boolean(problem.textContent)));
  };
  text.addEventListener('input', check);
  const move = (by) => {
    const other = by < 0 ? row.previousElementSibling : row.nextElementSibling;
    if (!other) return;
    // Moving the row itself would take the focus from its button.
    if (by < 0) row.after(other);
    else row.before(other);
    save();
  };
  const row = h('li', { 'data-mod': name },
    h('header', {}, h('b', {}, name),
      h('button', { type: 'button', title: 'Earlier', onclick: () => move(-1) }, '↑', h('span', { class: 'visually-hidden' }, ` Move ${name} up`)),
      h('button', { type: 'button', title: 'Later', onclick: () => move(1) }, '↓', h('span', { class: 'visually-hidden' }, ` Move ${name} down`)),
      h('button', { type: 'button', title: 'Remove', onclick: () => removeRow(row, 'addMod') }, '✕', h('span', { class: 'visually-hidden' }, ` Remove ${name}`))),
    option?.dataset.description ? h('p', { class: 'hint' }, option.dataset.description) : null,
    h('label', { class: 'visually-hidden', for: id }, `Configuration of ${name}, as JSON`), text, problem,
    configurationFields(JSON.parse(option?.dataset.schema || 'null')));
  mods.append(row);
  check();
}

/** Returns the values of the form. */
function readForm() {
  const field = (name) => form.elements[name];
  return {
    tab: tabs[1].getAttribute('aria-selected') === 'true' ? 'raw' : 'chat',
    messages: [...messages.children].map((row) => ({ role: row.querySelector('select').value, content: row.querySelector('textarea').value, more: row._more })),
    raw: raw.value,
    numbers: Object.fromEntries([...form.querySelectorAll('.fields input')].map((input) => [input.name, input.value])),
    stop: field('stop').value,
    tools: field('tools').value,
    schema: field('schema').value,
    extra: field('extra').value,
    mods: [...mods.children].map((row) => ({ name: row.dataset.mod, config: row.querySelector('textarea').value })),
    attention: field('attention').checked,
    lens: field('lens').checked,
    steering: steering.value,
    model: form.elements.model.value,
  };
}

/** Fills the form with the given values; others get their initial values, except the numbers, which remain. */
function writeForm(data) {
  messages.replaceChildren();
  for (const m of data.messages?.length ? data.messages : [{ role: 'user', content: '' }]) addMessage(m);
  raw.value = data.raw ?? '';
  for (const [name, value] of Object.entries(data.numbers ?? {})) if (form.elements[name]) form.elements[name].value = value;
  form.elements.stop.value = data.stop ?? '';
  for (const name of ['tools', 'schema', 'extra']) form.elements[name].value = data[name] ?? '';
  steering.value = data.steering ?? null;
  // Without control vectors on the server, the field only shows those of the run.
  steering.element.hidden = !vectors && !data.steering;
  form.elements.model.selectedIndex = optionOfModel(data.model)?.index ?? 0;
  if (data.tools || data.schema || data.extra || data.steering) form.elements.extra.closest('details').open = true;
  mods.replaceChildren();
  for (const m of data.mods ?? []) addMod(m);
  for (const name of ['attention', 'lens']) form.elements[name].checked = Boolean(data[name]) && !form.elements[name].disabled;
  selectTab(data.tab === 'raw' ? 1 : 0);
}

/** Stores the values of the form for the next visit. */
function save() {
  const data = readForm();
  localStorage.setItem(STORAGE_KEY, JSON.stringify(data));
  showChangedFields(data);
}
form.addEventListener('input', save);

/** Lists the fields that differ from the run with which the page was opened. */
function showChangedFields(data) {
  const changes = originalForm ? differences(originalForm, data) : [];
  changedFields.hidden = changes.length === 0;
  if (!changes.length) return;
  const shortened = (text) => (text === '' ? 'not set' : text.length > 80 ? `${text.slice(0, 80)}…` : text);
  changedFields.querySelector('summary').replaceChildren(`${changes.length} ${changes.length === 1 ? 'field differs' : 'fields differ'} from the run`);
  changedFields.querySelector('ul').replaceChildren(...changes.map(({ name, before, after }) => h('li', {},
    h('b', {}, name), ' ', h('del', {}, shortened(before)), ' → ', h('ins', {}, shortened(after)))));
}

/** Selects a tab: the chat (0) or the raw text (1). */
function selectTab(index, focus = false) {
  tabs.forEach((tab, i) => {
    tab.setAttribute('aria-selected', String(i === index));
    tab.tabIndex = i === index ? 0 : -1;
    document.getElementById(tab.getAttribute('aria-controls')).hidden = i !== index;
    if (focus && i === index) tab.focus();
  });
}
tabs.forEach((tab, i) => {
  tab.addEventListener('click', () => { selectTab(i); save(); });
  tab.addEventListener('keydown', (event) => {
    if (event.key === 'ArrowRight' || event.key === 'ArrowLeft') { selectTab(1 - i, true); save(); }
  });
});

// Runs.

/** Shows the replay of a run beside the form. */
function showRun(id, options) {
  replay?.close();
  replayBox.classList.remove('idle');
  replay = new Replay(replayBox, id, options);
  registerRunNavigation((place) => replay.visit(place));
  // On a small screen the run is below the form.
  const runPane = runLine.closest('.run-pane');
  if (options.isLive && runPane.getBoundingClientRect().top > innerHeight * 0.7) runPane.scrollIntoView({ block: 'start' });
  replay.open().catch((error) => showProblem(`Showing the run failed: ${error.message}.`));
}

/** Returns a link to a run. */
const runLink = (id, query = '') => h('a', { href: `${base}/runs/${encodeURIComponent(id)}${query}` }, id);

/** Shows the line above the replay for a new run, with a link that compares it with the run shown before. */
function showRunLine(id) {
  runLine.replaceChildren('recorded as ', runLink(id));
  if (shownRun) runLine.append(' · ', h('a', { href: `${base}/compare?${new URLSearchParams({ a: shownRun, b: id })}` }, 'compare with the previous run'));
}

/** Shows a problem below the buttons, or removes it if the text is empty. */
function showProblem(text) {
  problemBox.hidden = !text;
  problemBox.textContent = text;
  if (text) problemBox.scrollIntoView({ block: 'nearest' });
}

function setBusy(isBusy) {
  stopButton.disabled = !isBusy;
  form.querySelector('[data-action=generate]').setAttribute('aria-busy', String(isBusy));
}

/** Sends the request of the form and shows its run. */
async function generate() {
  showProblem('');
  const data = readForm();
  const reason = missingInput(data);
  if (reason) return showProblem(reason);
  let request;
  try { request = requestOf(data); } catch (error) { return showProblem(error.message); }
  activeRequest?.abort();
  const controller = new AbortController();
  activeRequest = controller;
  setBusy(true);
  status.textContent = 'Waiting for the model…';
  const startedAt = performance.now();
  try {
    const response = await fetchUrl(base + request.path, {
      method: 'POST',
      headers: { 'Content-Type': 'application/json', 'X-Requested-By': 'dashboard' },
      body: JSON.stringify(request.body),
      signal: controller.signal,
    });
    if (!response.ok) throw await errorOf(response);
    const id = response.headers.get('x-thunder-run-id');
    if (id) {
      showRunLine(id);
      shownRun = id;
      showRun(id, {
        isLive: true,
        hasAttention: Boolean(request.body.attention),
        state: { ...(replay?.state ?? {}), at: null },
        hooks: {
          connection: (text, ok) => { if (!ok) status.textContent = `Live view: ${text}.`; },
          ended: (run) => { if (activeRequest === controller || !activeRequest) status.textContent = endText(run, startedAt); },
        },
      });
    }
    status.textContent = 'Generating…';
    await readToEnd(response);
  } catch (error) {
    // Another request may have replaced this one.
    if (activeRequest !== controller) return undefined;
    status.textContent = controller.signal.aborted ? 'Stopped.' : '';
    if (!controller.signal.aborted) showProblem(error.message);
  } finally {
    if (activeRequest === controller) {
      activeRequest = null;
      setBusy(false);
      if (status.textContent === 'Generating…') status.textContent = 'Done.';
    }
  }
  return undefined;
}

/**
 * Reads the response to its end, because a run pauses if its client does not read. The replay shows the text, so only errors
 * are of interest here.
 */
async function readToEnd(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    const lines = buffer.split('\n');
    buffer = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data: {')) continue;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new Error(data.error.message ?? 'The run failed.');
    }
  }
}

/** Returns the status text at the end of a run. */
function endText(run, startedAt) {
  if (!run) return 'Done.';
  const seconds = run.generation_us ? run.generation_us / 1e6 : (performance.now() - startedAt) / 1000;
  const speed = run.completion_tokens && seconds > 0 ? `, ${(run.completion_tokens / seconds).toFixed(1)} tok/s` : '';
  return `${run.status ?? 'done'}: ${run.completion_tokens ?? 0} tokens${speed}${run.message ? ` · ${run.message}` : ''}`;
}

// Next-token mode.

const nextToken = new NextToken(nextTokenBox, raw, {
  request: (ids) => requestOf({ ...readForm(), tab: 'raw', raw: ids }),
  changed: save,
  onError: showProblem,
});
for (const field of [raw, form.elements.model]) field.addEventListener('input', () => nextToken.clear());

/** Computes the next token of the raw text. A chat is first rendered by the model's template. */
async function showNextToken() {
  showProblem('');
  const data = readForm();
  const reason = missingInput(data);
  if (reason) return showProblem(reason);
  try {
    if (data.tab === 'chat') {
      const { body } = requestOf(data);
      const response = await sendJson('/apply-template', body);
      raw.value = (await response.json()).prompt;
      selectTab(1);
      save();
    }
    await nextToken.next();
  } catch (error) {
    showProblem(error.message);
  }
  return undefined;
}

form.addEventListener('submit', (event) => {
  event.preventDefault();
  generate();
});

form.addEventListener('click', (event) => {
  const action = event.target.closest('[data-action]')?.dataset.action;
  if (action === 'stop') activeRequest?.abort();
  else if (action === 'computeNext') showNextToken();
  else if (action === 'addMessage') {
    const last = messages.lastElementChild?.querySelector('select').value;
    addMessage({ role: last === 'user' ? 'assistant' : 'user' }).querySelector('textarea').focus();
    save();
  } else if (action === 'clearMessages') {
    writeForm({ ...readForm(), messages: [] });
    save();
    messages.querySelector('textarea').focus();
  } else if (action === 'addMod') {
    const option = form.querySelector('[data-add-mod]').selectedOptions[0];
    if (!option) return toast('No mod is registered on this server.');
    addMod({ name: option.value, config: exampleConfig(option) });
    save();
  } else if (action === 'curl') {
    try { copyText(curlOf(requestOf(readForm()), location.origin + base, form.dataset.keyVariable), 'curl command'); } catch (error) { showProblem(error.message); }
  }
  return undefined;
});

listenForShortcuts(['playground', 'replay'], (action, key) => {
  if (action === 'generate') { generate(); return true; }
  if (action === 'computeNext') { showNextToken(); return true; }
  if (action === 'escape') {
    if (!activeRequest) return false;
    activeRequest.abort();
    return true;
  }
  if (action === 'copy') {
    if (!shownRun) return false;
    copyText(`${location.origin}${base}/runs/${shownRun}`, 'link to the run');
    return true;
  }
  return replay ? replay.act(action, key) : false;
});

/** Returns the text of a run at event `n`: prompt and answer. */
async function textAt(id, n) {
  const columns = await fetchApi(`/api/v1/runs/${encodeURIComponent(id)}/columns`);
  const run = Run.stored(await columns.arrayBuffer());
  return run.sequence(n).map((row) => run.text(row)).join('');
}

// The initial values of the form: those of a run (`?from=`), those of the last visit, or empty ones.

/** Returns the values of the last visit, or an empty object. */
function storedForm() {
  try {
    return JSON.parse(localStorage.getItem(STORAGE_KEY)) ?? {};
  } catch {
    return {};
  }
}

/**
 * Fills the form from a run and shows its replay. If the query has an event (`?at=`), the form continues the text at that event,
 * with the text `?next=` after it. The mod `?mod=` is added.
 */
async function fillFromRun(id, query) {
  const path = `/api/v1/runs/${encodeURIComponent(id)}`;
  const [summary, items] = await Promise.all([
    fetchApi(path).then((r) => r.json()).catch(() => null),
    fetchApi(`${path}/events?from=0&to=1`, { headers: { Accept: 'application/x-ndjson' } }).then((r) => r.text()),
  ]);
  const prefilled = items.split('\n').filter(Boolean).map((line) => JSON.parse(line)).find((item) => item.kind === 'event');
  const prompt = prefilled?.details?.prompt;
  const values = formOf(prompt, summary?.run);
  const at = /^\d+$/.test(query.get('at') ?? '') ? Number(query.get('at')) : null;
  if (at !== null) {
    const text = (await textAt(id, at)) + (query.get('next') ?? '');
    Object.assign(values, { tab: 'raw', raw: text, tools: '', schema: '', extra: extraFields(prompt, true) });
  }
  const mod = query.get('mod');
  const option = mod && optionOf(mod);
  if (option && !values.mods.some((one) => one.name === mod)) values.mods.push({ name: mod, config: exampleConfig(option) });
  const stored = storedForm();
  writeForm({ ...stored, ...values, numbers: { ...stored.numbers, ...values.numbers } });
  originalForm = readForm();
  if (values.model && !optionOfModel(values.model)) {
    showProblem(`This server does not have the model “${values.model}” of the run; requests use ${originalForm.model || 'its default model'}.`);
    originalForm.model = values.model;
    showChangedFields(readForm());
  }
  showRun(id, { hasAttention: Boolean(summary?.run?.has_attention), state: { at }, hooks: {} });
  if (at === null) runLine.replaceChildren('settings of ', runLink(id));
  else runLine.replaceChildren(`the text at event ${at} of `, runLink(id, `?at=${at}`));
  shownRun = id;
}

async function fillForm() {
  const query = new URL(location).searchParams;
  const from = query.get('from');
  if (from) {
    try {
      await fillFromRun(from, query);
    } catch (error) {
      writeForm(storedForm());
      showProblem(`Loading run ${from} failed: ${error.message}.`);
    }
    return;
  }
  const mod = query.get('mod');
  const option = mod && optionOf(mod);
  writeForm({ ...storedForm(), ...(option && { mods: [{ name: mod, config: exampleConfig(option) }] }) });
  if (mod && !option) showProblem(`Unknown mod '${mod}'.`);
}

fillForm();

// The starters, which the replay of the first run replaces.
const available = [...form.querySelectorAll('[data-add-mod] option')].map((option) => option.value);
if (!form.elements.attention.disabled) available.push('attention');
// The page has a warning while no model can answer.
const canGenerate = form.elements.model.value && !document.querySelector('main > .banner.warn');
if (canGenerate && !new URL(location).searchParams.has('from')) {
  const buttons = starterButtons(available, (chosen) => {
    writeForm({ ...readForm(), ...chosen });
    save();
    generate();
  });
  if (buttons) replayBox.querySelector('[data-text]').append(buttons);
}
runLine.addEventListener('click', async (event) => {
  if (event.target.matches('[data-sample]')) (await import('./sample.js')).openSample(event.target);
});
