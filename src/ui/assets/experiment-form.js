// The form that starts an experiment.
import { base, fetchApi, sendJson } from './api.js';
import { h } from './dom.js';
import { cellsOf, definitionOf, fieldOf, formOf } from './experiment-definition.js';
import { listenForShortcuts } from './keys.js';

const form = document.querySelector('[data-form]');
const fields = form.elements;
const cellCount = document.querySelector('[data-cells]');
const problem = document.querySelector('[data-problem]');
const startButton = form.querySelector('[type=submit]');

/** Returns the texts of the form. */
const readForm = () => ({
  name: fields.name.value,
  model: fields.model?.value ?? '',
  prompts: fields.prompts.value,
  format: fields.format.value,
  seeds: fields.seeds.value,
  mods: fields.mods.value,
  parameters: fields.parameters.value,
  scorer: fields.scorer.value,
  regex: fields.regex.value,
  python: fields.python.value,
});

/** Fills the form with texts; fields with an empty text remain as they are. */
function fillForm(texts) {
  for (const [name, value] of Object.entries(texts)) {
    if (fields[name] && value !== '') fields[name].value = value;
  }
  showCount();
}

/** Returns the control that shows an error of a field. */
const controlOf = (field) => (field === 'score' ? fields[fields.scorer.value === 'python' ? 'python' : 'regex'] : fields[field]);

function clearErrors() {
  problem.hidden = true;
  for (const message of form.querySelectorAll('.field-error')) message.textContent = '';
  for (const control of form.querySelectorAll('[aria-invalid]')) control.removeAttribute('aria-invalid');
}

/** Shows an error at its field, or below the form. */
function showError(message, field) {
  const fieldMessage = field && form.querySelector(`#${field}-error`);
  if (!fieldMessage) {
    problem.hidden = false;
    problem.textContent = message;
    problem.scrollIntoView({ block: 'nearest' });
    return;
  }
  fieldMessage.textContent = message;
  controlOf(field).setAttribute('aria-invalid', 'true');
  controlOf(field).focus();
}

/** Shows the number of runs that the experiment would have, even if it still lacks a name or the text of its score. */
function showCount() {
  try {
    const count = cellsOf(definitionOf({ ...readForm(), name: 'x', regex: 'x', python: 'x' }));
    cellCount.textContent = `${count} run${count === 1 ? '' : 's'}`;
  } catch {
    cellCount.textContent = '';
  }
}

/** Starts the experiment and opens its page. */
async function start() {
  clearErrors();
  let definition;
  try {
    definition = definitionOf(readForm());
  } catch (error) {
    showError(error.message, error.field);
    return;
  }
  startButton.disabled = true;
  try {
    const response = await sendJson('/api/v1/experiments', definition);
    location.assign(`${base}/experiments/${(await response.json()).experiment_id}`);
  } catch (error) {
    showError(`Not started: ${error.message}`, fieldOf(error.pointer));
    startButton.disabled = false;
  }
}

// After Back, the browser restores the page with the button disabled.
addEventListener('pageshow', ({ persisted }) => { if (persisted) startButton.disabled = false; });

form.addEventListener('submit', (event) => {
  event.preventDefault();
  start();
});
form.addEventListener('input', () => {
  clearErrors();
  showCount();
});
// Typing a regular expression or a function also selects that score.
for (const scorer of ['regex', 'python']) fields[scorer].addEventListener('input', () => { fields.scorer.value = scorer; });

// A file with prompts.
const file = h('input', { type: 'file', accept: '.csv,.txt,text/csv,text/plain', hidden: true });
form.append(file);
form.querySelector('[data-action=file]').addEventListener('click', () => file.click());
file.addEventListener('change', async () => {
  const [chosen] = file.files;
  if (!chosen) return;
  fillForm({ prompts: await chosen.text(), format: /\.csv$/i.test(chosen.name) ? 'csv' : 'lines' });
  file.value = '';
});

// The buttons that add a line with a mod.
for (const button of document.querySelectorAll('[data-add]')) {
  button.addEventListener('click', () => {
    const line = `${button.dataset.add}${button.dataset.config ? ` ${button.dataset.config}` : ''}`;
    fields.mods.value = `${fields.mods.value.trimEnd()}\n${line}`.trimStart();
    fields.mods.focus();
    showCount();
  });
}

listenForShortcuts(['experimentForm'], (action) => {
  if (action !== 'start' || startButton.disabled) return false;
  start();
  return true;
});

// `?from=` is the id of an experiment whose definition fills the form.
const from = new URLSearchParams(location.search).get('from');
if (from) {
  try {
    const response = await fetchApi(`/api/v1/experiments/${encodeURIComponent(from)}`);
    const { definition } = await response.json();
    fillForm(formOf(definition));
  } catch (error) {
    showError(`The experiment was not loaded: ${error.message}`);
  }
}
showCount();
if (!from) fields.name.focus();
