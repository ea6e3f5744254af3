// The form that starts an experiment.
import { base, fetchApi, h } from './dom.js';
import { cellsOf, definitionOf, fieldOf, formOf } from './experiment-definition.js';
import { listenForShortcuts } from './keys.js';

const form = document.querySelector('[data-form]');
const fields = form.elements;
const cells = document.querySelector('[data-cells]');
const problem = document.querySelector('[data-problem]');
const button = form.querySelector('[type=submit]');

/** Returns the values of the form. */
const values = () => ({
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

/** Fills the form. */
function fillForm(texts) {
  for (const [name, value] of Object.entries(texts)) {
    if (fields[name] && value !== '') fields[name].value = value;
  }
  showCount();
}

/** Returns the control of a field. */
const control = (field) => (field === 'score' ? fields[fields.scorer.value === 'python' ? 'python' : 'regex'] : fields[field]);

function clearErrors() {
  problem.hidden = true;
  for (const place of form.querySelectorAll('.field-error')) place.textContent = '';
  for (const invalid of form.querySelectorAll('[aria-invalid]')) invalid.removeAttribute('aria-invalid');
}

/** Shows an error at its field, or below the form. */
function showError(message, field) {
  const place = field && form.querySelector(`#${field}-error`);
  if (!place) {
    problem.hidden = false;
    problem.textContent = message;
    problem.scrollIntoView({ block: 'nearest' });
    return;
  }
  place.textContent = message;
  control(field).setAttribute('aria-invalid', 'true');
  control(field).focus();
}

/** Shows the number of runs while the form is edited. */
function showCount() {
  try {
    const number = cellsOf(definitionOf({ ...values(), name: 'x', regex: 'x', python: 'x' }));
    cells.textContent = `${number} run${number === 1 ? '' : 's'}`;
  } catch {
    cells.textContent = '';
  }
}

async function start() {
  clearErrors();
  let definition;
  try {
    definition = definitionOf(values());
  } catch (error) {
    showError(error.message, error.field);
    return;
  }
  button.disabled = true;
  try {
    const response = await fetchApi('/api/v1/experiments', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(definition) });
    location.assign(`${base}/experiments/${(await response.json()).experiment_id}`);
  } catch (error) {
    showError(`Not started: ${error.message}`, fieldOf(error.pointer));
    button.disabled = false;
  }
}

form.addEventListener('submit', (event) => {
  event.preventDefault();
  start();
});
form.addEventListener('input', () => {
  clearErrors();
  showCount();
});
for (const scorer of ['regex', 'python']) fields[scorer].addEventListener('input', () => { fields.scorer.value = scorer; });

const file = h('input', { type: 'file', accept: '.csv,.txt,text/csv,text/plain', hidden: true });
form.append(file);
form.querySelector('[data-action=file]').addEventListener('click', () => file.click());
file.addEventListener('change', async () => {
  const [chosen] = file.files;
  if (!chosen) return;
  fillForm({ prompts: await chosen.text(), format: /\.csv$/i.test(chosen.name) ? 'csv' : 'lines' });
  file.value = '';
});

for (const add of document.querySelectorAll('[data-add]')) {
  add.addEventListener('click', () => {
    const line = `${add.dataset.add}${add.dataset.config ? ` ${add.dataset.config}` : ''}`;
    fields.mods.value = `${fields.mods.value.trimEnd()}\n${line}`.trimStart();
    fields.mods.focus();
    showCount();
  });
}

listenForShortcuts(['experimentForm'], (action) => {
  if (action !== 'start' || button.disabled) return false;
  start();
  return true;
});

const from = new URLSearchParams(location.search).get('from');
if (from) {
  try {
    fillForm(formOf((await (await fetchApi(`/api/v1/experiments/${encodeURIComponent(from)}`)).json()).definition));
  } catch (error) {
    showError(`The experiment was not loaded: ${error.message}`);
  }
}
showCount();
if (!from) fields.name.focus();
