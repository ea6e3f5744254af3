// The dry run of a mod in its editor: the server calls the edited mod with the events of a recorded run, and compares its
// actions with the recorded ones.
import { base, fetchApi, sendJson } from './api.js';
import { h } from './dom.js';

/** Maximum number of runs that the field suggests. */
const MAX_SUGGESTED = 20;
/** Maximum rows of the table. */
const MAX_ROWS = 500;

/** Returns the text of an action in the table. */
const actionText = (action) => (action === 'Noop' ? 'nothing' : action);

/** Returns the table of a report on the run `id`. `go({file, line})` moves the editor to a line. */
function table(report, id, go) {
  const rows = report.events.slice(0, MAX_ROWS).map((event) => {
    const isFirstDifference = event.sequence_order === report.difference?.sequence_order;
    return h('tr', { class: isFirstDifference ? 'diverged' : event.differs ? 'differs' : null },
      h('td', { class: 'num' }, h('a', { href: `${base}/runs/${encodeURIComponent(id)}?at=${event.sequence_order}` }, String(event.step))),
      h('td', {}, event.event, isFirstDifference ? h('b', {}, ' first difference') : ''),
      h('td', {}, actionText(event.recorded)),
      h('td', {}, actionText(event.now),
        event.line ? [' ', h('button', { type: 'button', class: 'link', onclick: () => go(event) }, event.file ? `${event.file}, line ${event.line}` : `Line ${event.line}`)] : '',
        event.logs.map((line) => h('div', { class: 'hint' }, line))));
  });
  return h('div', { class: 'table-box', tabindex: '0', role: 'region', 'aria-label': 'Replies of the mod' }, h('table', { class: 'table dry-table' },
    h('thead', {}, h('tr', {}, ['Step', 'Event', 'Recorded', 'New'].map((name) => h('th', { scope: 'col' }, name)))),
    h('tbody', {}, rows)));
}

/** Returns the first problem of a report at a line of the source, for the editor, as a list. */
function firstProblem({ events }) {
  const failed = events.find((event) => event.line);
  return failed ? [{ file: failed.file, line: failed.line, message: failed.exception, traceback: null }] : [];
}

/** Returns the summary of a report. */
function summary(report) {
  const unused = report.recorded ? '' : ' The recorded run did not use this mod.';
  const incomplete = report.complete ? '' : ' The time limit was reached before the end of the run.';
  const result = report.difference ? `The first difference is at step ${report.difference.step}.` : 'The actions are the same as recorded.';
  return `${report.calls} call${report.calls === 1 ? '' : 's'}. ${result}${unused}${incomplete}`;
}

/**
 * Sets up the section of the dry run. `upload()` returns the edited mod, `showProblems(problems)` shows problems at their
 * lines, `go({file, line})` moves the editor to a line, and `saveAndOpen(href)` saves the mod and opens a page.
 */
export function setUpDryRun(section, { upload, showProblems, go, saveAndOpen }) {
  const form = section.querySelector('form');
  const { run: field, config: configField } = form.elements;
  const button = form.querySelector('[type=submit]');
  const status = section.querySelector('[role=status]');
  const result = section.querySelector('[data-dry-run-result]');

  // The suggestions are loaded each time, because there may be newer runs.
  field.addEventListener('focus', async () => {
    const { runs } = await (await fetchApi(`/api/v1/runs?limit=${MAX_SUGGESTED}`)).json();
    const label = (run) => `${run.prompt_preview.slice(0, 60)} → ${run.output_preview.slice(0, 60)}`;
    section.querySelector('datalist').replaceChildren(...runs.map((run) => h('option', { value: run.request_id, label: label(run) })));
  });

  /** Returns the link that saves the mod and opens the playground with it and the settings of the run. */
  function playgroundLink(id) {
    const href = `${base}/playground?${new URLSearchParams({ from: id, mod: upload().name })}`;
    const onclick = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      saveAndOpen(href);
    };
    return h('a', { class: 'button', href, onclick }, 'Run for real in the playground');
  }

  function showReport(report, id) {
    status.textContent = summary(report);
    const { length } = report.events;
    if (length) result.append(table(report, id, go));
    if (length > MAX_ROWS) result.append(h('p', { class: 'hint' }, `${length - MAX_ROWS} more events`));
    result.append(h('p', { class: 'links' }, playgroundLink(id)));
  }

  function showError(text) {
    status.className = 'form-error';
    status.textContent = text;
  }

  /** Returns the configuration, or undefined for that of the recorded run. */
  function configuration() {
    const text = configField.value.trim();
    try {
      return text ? JSON.parse(text) : undefined;
    } catch (error) {
      throw new Error(`the configuration is not valid JSON: ${error.message}`);
    }
  }

  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    const id = field.value.trim();
    button.disabled = true;
    status.className = 'hint';
    status.textContent = 'Calling the mod…';
    result.replaceChildren();
    try {
      const response = await sendJson('/api/v1/mods/dry-runs', { mod: upload(), run: id, config: configuration() });
      const { problems, report } = await response.json();
      showProblems(report ? firstProblem(report) : problems);
      if (report) showReport(report, id);
      else showError('The mod could not be called.');
    } catch (error) {
      showError(`Not run: ${error.message}`);
    } finally {
      button.disabled = false;
    }
  });
}
