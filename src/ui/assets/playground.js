// The playground: a form for the public API, and the replay of the run it starts.
import { base, copy, errorOf, fetchApi, fetchUrl, h, toast } from './dom.js';
import { listen } from './keys.js';
import { NextToken } from './next-token.js';
import { Run } from './replay/run.js';
import { Replay } from './replay/view.js';
import { registerRunNavigation } from './shell.js';
import { starters } from './starters.js';
import { SteeringField } from './steering.js';
import { curlOf, differences, extraFields, formOf, missingInput, requestOf } from './request.js';

const SAVED = 'thunder.playground';
const ROLES = ['system', 'user', 'assistant'];

const form = document.querySelector('[data-request-form]');
const pane = document.querySelector('[data-replay]');
const state = document.querySelector('[data-state]');
const problemBox = document.querySelector('[data-problem]');
const recorded = document.querySelector('[data-recorded]');
const messages = document.querySelector('[data-messages]');
const raw = document.querySelector('[data-raw]');
const mods = document.querySelector('[data-mods]');
const stopButton = form.querySelector('[data-act=stop]');
const tabs = [...form.querySelectorAll('[role=tab]')];

const differs = document.querySelector('[data-differs]');
const nextBox = document.querySelector('[data-next]');
const vectors = JSON.parse(pane.dataset.vectors ?? 'null');
const steering = new SteeringField(vectors ?? { names: [], layers: 0 }, 'Select control vectors', () => save());
form.elements.attention.closest('label').after(steering.element);

let view = null;
let running = null;
let previous = null;
/** The values of the form for the run that the page was opened with, or null. */
let origin = null;

// The form.

/** Adds a message to the chat. */
function addMessage({ role = 'user', content = '', more } = {}) {
  const number = messages.children.length + 1;
  const row = h('li', { class: 'message' },
    h('header', {},
      h('select', { 'aria-label': `Role of message ${number}` }, ROLES.map((r) => h('option', { value: r }, r))),
      h('button', { type: 'button', title: 'Remove this message', onclick: () => { row.remove(); save(); } }, '✕', h('span', { class: 'vh' }, ' Remove message'))),
    h('textarea', { rows: '2', 'aria-label': `Message ${number}`, placeholder: role === 'system' ? 'Instructions for the model' : 'Message…' }),
    more ? h('details', { class: 'hint' }, h('summary', {}, Object.keys(more).join(', ')), h('pre', { class: 'trace', tabindex: '0' }, JSON.stringify(more, null, 2))) : null);
  row._more = more;
  if (!ROLES.includes(role)) row.querySelector('select').append(h('option', { value: role }, role));
  row.querySelector('select').value = role;
  row.querySelector('textarea').value = content;
  messages.append(row);
  return row;
}

/** Lists the fields of a mod's configuration. */
function configurationFields(schema) {
  const known = Object.entries(schema?.properties ?? {});
  if (!known.length) return null;
  const needed = new Set(schema.required ?? []);
  return h('details', { class: 'hint' }, h('summary', {}, 'Fields'),
    h('dl', {}, known.flatMap(([name, field]) => [
      h('dt', {}, h('code', {}, name), needed.has(name) ? ' (required)' : 'default' in field ? ` = ${JSON.stringify(field.default)}` : ''),
      h('dd', {}, field.description ?? '', field.enum ? ` One of ${field.enum.join(', ')}.` : ''),
    ])));
}

/** Returns an example configuration of a mod. */
const example = (option) => (option.dataset.config === 'null' ? '' : option.dataset.config);

/** Adds a mod to the list. */
function addMod({ name, config = '' }) {
  const option = form.querySelector(`[data-mod-add] option[value="${CSS.escape(name)}"]`);
  const id = `mod-${crypto.randomUUID?.() ?? Math.random()}`;
  const text = h('textarea', { id, rows: '1', spellcheck: 'false', placeholder: 'no configuration', oninput: () => check() });
  text.value = config;
  const check = () => {
    let wrong = '';
    try { if (text.value.trim()) JSON.parse(text.value); } catch (error) { wrong = error.message; }
    text.setAttribute('aria-invalid', String(Boolean(wrong)));
    note.textContent = wrong;
  };
  const note = h('p', { class: 'err', role: 'status' });
  const move = (by) => {
    const other = by < 0 ? row.previousElementSibling : row.nextElementSibling;
    if (!other) return;
    if (by < 0) other.before(row);
    else other.after(row);
    save();
  };
  const row = h('li', { 'data-mod': name },
    h('header', {}, h('b', {}, name),
      h('button', { type: 'button', title: 'Earlier', onclick: () => move(-1) }, '↑', h('span', { class: 'vh' }, ` Move ${name} up`)),
      h('button', { type: 'button', title: 'Later', onclick: () => move(1) }, '↓', h('span', { class: 'vh' }, ` Move ${name} down`)),
      h('button', { type: 'button', title: 'Remove', onclick: () => { row.remove(); save(); } }, '✕', h('span', { class: 'vh' }, ` Remove ${name}`))),
    option?.dataset.description ? h('p', { class: 'hint' }, option.dataset.description) : null,
    h('label', { class: 'vh', for: id }, `Configuration of ${name}, as JSON`), text, note,
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
    steering: steering.value,
    model: form.dataset.model,
  };
}

/** Fills the form. */
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
  if (data.tools || data.schema || data.extra || data.steering) form.elements.extra.closest('details').open = true;
  mods.replaceChildren();
  for (const m of data.mods ?? []) addMod(m);
  form.elements.attention.checked = Boolean(data.attention) && !form.elements.attention.disabled;
  selectTab(data.tab === 'raw' ? 1 : 0);
}

function save() {
  const data = readForm();
  localStorage.setItem(SAVED, JSON.stringify(data));
  compare(data);
}
form.addEventListener('input', save);

/** Lists the fields that differ from the run that the page was opened with. */
function compare(data) {
  const changes = origin ? differences(origin, data) : [];
  differs.hidden = changes.length === 0;
  if (!changes.length) return;
  const short = (text) => (text === '' ? 'not set' : text.length > 80 ? `${text.slice(0, 80)}…` : text);
  differs.querySelector('summary').replaceChildren(`${changes.length} ${changes.length === 1 ? 'field differs' : 'fields differ'} from the run`);
  differs.querySelector('ul').replaceChildren(...changes.map(({ name, before, after }) => h('li', {}, h('b', {}, name), ' ', h('del', {}, short(before)), ' → ', h('ins', {}, short(after)))));
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

/** Shows a run beside the form. */
function showRun(id, options) {
  view?.close();
  pane.classList.remove('idle');
  view = new Replay(pane, id, options);
  registerRunNavigation((place) => view.visit(place));
  // On a small screen the run is below the form.
  const head = recorded.closest('.live');
  if (options.live && head.getBoundingClientRect().top > innerHeight * 0.7) head.scrollIntoView({ block: 'start' });
  view.open().catch((error) => fail(`Showing the run failed: ${error.message}.`));
}

function fail(text) {
  problemBox.hidden = !text;
  problemBox.textContent = text;
  if (text) problemBox.scrollIntoView({ block: 'nearest' });
}

function setBusy(on) {
  stopButton.disabled = !on;
  form.querySelector('[data-act=generate]').setAttribute('aria-busy', String(on));
}

async function generate() {
  fail('');
  const data = readForm();
  const reason = missingInput(data);
  if (reason) return fail(reason);
  let request;
  try { request = requestOf(data); } catch (error) { return fail(error.message); }
  running?.abort();
  const controller = new AbortController();
  running = controller;
  setBusy(true);
  state.textContent = 'Waiting for the model…';
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
      recorded.replaceChildren('recorded as ', h('a', { href: `${base}/runs/${encodeURIComponent(id)}` }, id), ...(previous ? [' · ', h('a', { href: `${base}/compare?${new URLSearchParams({ a: previous, b: id })}` }, 'compare with the previous run')] : []));
      previous = id;
      showRun(id, {
        live: true,
        recorded: Boolean(request.body.attention),
        state: { ...(view?.state ?? {}), at: null },
        hooks: {
          connection: (text, ok) => { if (!ok) state.textContent = `Live view: ${text}.`; },
          ended: (run) => { if (running === controller || !running) state.textContent = endText(run, startedAt); },
        },
      });
    }
    state.textContent = 'Generating…';
    await drain(response);
  } catch (error) {
    if (controller.signal.aborted) state.textContent = 'Stopped.';
    else {
      state.textContent = '';
      fail(error.message);
    }
  } finally {
    if (running === controller) {
      running = null;
      setBusy(false);
      if (state.textContent === 'Generating…') state.textContent = 'Done.';
    }
  }
  return undefined;
}

/** Reads the response and ignores its text, which the replay shows. A run pauses if its client does not read. */
async function drain(response) {
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

/** Returns the line that describes the end of a run. */
function endText(run, startedAt) {
  if (!run) return 'Done.';
  const seconds = run.generation_us ? run.generation_us / 1e6 : (performance.now() - startedAt) / 1000;
  const speed = run.completion_tokens && seconds > 0 ? `, ${(run.completion_tokens / seconds).toFixed(1)} tok/s` : '';
  return `${run.status ?? 'done'}: ${run.completion_tokens ?? 0} tokens${speed}${run.message ? ` · ${run.message}` : ''}`;
}

// Next-token mode.

const nextToken = new NextToken(nextBox, raw, {
  request: (ids) => requestOf({ ...readForm(), tab: 'raw', raw: ids }),
  changed: save,
  fail,
});
raw.addEventListener('input', () => nextToken.clear());

/** Computes the next token of the raw text. A chat is first rendered by the model's template. */
async function showNextToken() {
  fail('');
  const data = readForm();
  const reason = missingInput(data);
  if (reason) return fail(reason);
  try {
    if (data.tab === 'chat') {
      const { body } = requestOf(data);
      const response = await fetchApi('/apply-template', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body) });
      raw.value = (await response.json()).prompt;
      selectTab(1);
      save();
    }
    await nextToken.next();
  } catch (error) {
    fail(error.message);
  }
  return undefined;
}

form.addEventListener('submit', (event) => {
  event.preventDefault();
  generate();
});

form.addEventListener('click', (event) => {
  const action = event.target.closest('[data-act]')?.dataset.act;
  if (action === 'stop') running?.abort();
  else if (action === 'next') showNextToken();
  else if (action === 'addMessage') {
    const last = messages.lastElementChild?.querySelector('select').value;
    addMessage({ role: last === 'user' ? 'assistant' : 'user' }).querySelector('textarea').focus();
    save();
  } else if (action === 'clearMessages') {
    writeForm({ ...readForm(), messages: [] });
    save();
    messages.querySelector('textarea').focus();
  } else if (action === 'addMod') {
    const option = form.querySelector('[data-mod-add]').selectedOptions[0];
    if (!option) return toast('No mod is registered on this server.');
    addMod({ name: option.value, config: example(option) });
    save();
  } else if (action === 'curl') {
    try { copy(curlOf(requestOf(readForm()), location.origin + base), 'curl command'); } catch (error) { fail(error.message); }
  }
  return undefined;
});

listen(['playground', 'replay'], (action, key) => {
  if (action === 'generate') { generate(); return true; }
  if (action === 'computeNext') { showNextToken(); return true; }
  if (action === 'escape') {
    if (!running) return false;
    running.abort();
    return true;
  }
  if (action === 'copy') {
    if (!previous) return false;
    copy(`${location.origin}${base}/runs/${previous}`, 'link to the run');
    return true;
  }
  return view ? view.act(action, key) : false;
});

/** Returns prompt and answer of a run at event `n`. */
async function textAt(id, n) {
  const columns = await fetchApi(`/api/v1/runs/${encodeURIComponent(id)}/columns`);
  const run = Run.stored(await columns.arrayBuffer());
  return run.sequence(n).map((row) => run.text(row)).join('');
}

// The initial form: from a run (`?from=`), from the last visit, or empty.
async function fillForm() {
  const query = new URL(location).searchParams;
  const from = query.get('from');
  const saved = localStorage.getItem(SAVED);
  let data = {};
  try { if (saved) data = JSON.parse(saved); } catch { /* unreadable, so the form is empty */ }
  if (!from) {
    const wanted = query.get('mod');
    const option = wanted && form.querySelector(`[data-mod-add] option[value="${CSS.escape(wanted)}"]`);
    writeForm(option ? { ...data, mods: [{ name: wanted, config: example(option) }] } : data);
    if (wanted && !option) fail(`Unknown mod '${wanted}'.`);
    return undefined;
  }
  try {
    const [summary, items] = await Promise.all([
      fetchApi(`/api/v1/runs/${encodeURIComponent(from)}`).then((r) => r.json()).catch(() => null),
      fetchApi(`/api/v1/runs/${encodeURIComponent(from)}/events?from=0&to=1`, { headers: { Accept: 'application/x-ndjson' } }).then((r) => r.text()),
    ]);
    const event = items.split('\n').filter(Boolean).map((line) => JSON.parse(line)).find((i) => i.kind === 'event');
    const fromRun = formOf(event?.details?.prompt, summary?.run);
    const at = /^\d+$/.test(query.get('at') ?? '') ? Number(query.get('at')) : null;
    if (at !== null) Object.assign(fromRun, { tab: 'raw', raw: (await textAt(from, at)) + (query.get('next') ?? ''), tools: '', schema: '', extra: extraFields(event?.details?.prompt, true) });
    const added = query.get('mod');
    const option = added && form.querySelector(`[data-mod-add] option[value="${CSS.escape(added)}"]`);
    if (option && !fromRun.mods?.some((one) => one.name === added)) fromRun.mods = [...(fromRun.mods ?? []), { name: added, config: example(option) }];
    writeForm({ ...data, ...fromRun, numbers: { ...data.numbers, ...fromRun.numbers } });
    origin = readForm();
    showRun(from, { recorded: Boolean(summary?.run?.has_attention), state: { at }, hooks: {} });
    recorded.replaceChildren(at === null ? 'settings of ' : `the text at event ${at} of `, h('a', { href: `${base}/runs/${encodeURIComponent(from)}${at === null ? '' : `?at=${at}`}` }, from));
    previous = from;
  } catch (error) {
    writeForm(data);
    fail(`Loading run ${from} failed: ${error.message}.`);
  }
  return undefined;
}

fillForm();

const offered = [...form.querySelectorAll('[data-mod-add] option')].map((option) => option.value);
if (!form.elements.attention.disabled) offered.push('attention');
// The replay of the first run replaces the starters.
const canStart = form.dataset.model && !document.querySelector('main > .banner.warn') && !new URL(location).searchParams.has('from');
const starterButtons = canStart && starters(offered, (chosen) => {
  writeForm({ ...readForm(), ...chosen });
  save();
  generate();
});
if (starterButtons) pane.querySelector('[data-text]').append(starterButtons);
recorded.addEventListener('click', async (event) => {
  if (event.target.matches('[data-sample]')) (await import('./sample.js')).openSample(event.target);
});
