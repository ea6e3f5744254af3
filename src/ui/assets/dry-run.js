// The dry run of a mod in its editor: calls the edited mod with the events of a recorded run and compares its actions.
import { base, fetchApi, h } from './dom.js';

/** Maximum number of suggested runs, newest first. */
const MAX_SUGGESTED = 20;
/** Maximum rows of the table. */
const MAX_ROWS = 500;

/** Returns the displayed text of a reply. */
const replyText = (reply) => (reply === 'Noop' ? 'nothing' : reply);

/** Returns the table of a report. `go(reply)` moves the editor to the file and line of a failed reply. */
function table(report, id, go) {
  const rows = report.events.slice(0, MAX_ROWS).map((reply) => {
    const isFirst = reply.sequence_order === report.difference?.sequence_order;
    return h('tr', { class: isFirst ? 'diverged' : reply.differs ? 'differs' : null },
      h('td', { class: 'num' }, h('a', { href: `${base}/runs/${encodeURIComponent(id)}?at=${reply.sequence_order}` }, String(reply.step))),
      h('td', {}, reply.event, isFirst ? h('b', {}, ' first difference') : ''),
      h('td', {}, replyText(reply.recorded)),
      h('td', {}, replyText(reply.now),
        reply.line ? [' ', h('button', { type: 'button', class: 'link', onclick: () => go(reply) }, reply.file ? `${reply.file}, line ${reply.line}` : `Line ${reply.line}`)] : '',
        reply.logs.map((line) => h('div', { class: 'hint' }, line))));
  });
  return h('div', { class: 'table-box', tabindex: '0', role: 'region', 'aria-label': 'Replies of the mod' }, h('table', { class: 'table dry-table' },
    h('thead', {}, h('tr', {}, ['Step', 'Event', 'Recorded', 'New'].map((name) => h('th', { scope: 'col' }, name)))),
    h('tbody', {}, rows)));
}

/** Returns the summary of a report. */
function summary(report) {
  const used = report.recorded ? '' : ' The recorded run did not use this mod.';
  const rest = report.complete ? '' : ' The time limit was reached before the end of the run.';
  const result = report.difference ? `The first difference is at step ${report.difference.step}.` : 'The actions are the same as recorded.';
  return `${report.calls} call${report.calls === 1 ? '' : 's'}. ${result}${used}${rest}`;
}

/**
 * Sets up the section. `upload()` returns the edited mod, `show(problems)` shows problems at their lines, `go({file, line})`
 * moves the editor, and `save()` saves the mod.
 */
export function dryRun(section, { upload, show, go, save }) {
  const form = section.querySelector('form');
  const box = form.elements.run;
  const button = form.querySelector('[type=submit]');
  const state = section.querySelector('[role=status]');
  const result = section.querySelector('[data-dry-result]');

  // Each focus loads the list again, because runs may have ended since then.
  box.addEventListener('focus', async () => {
    const { runs } = await (await fetchApi(`/api/v1/runs?limit=${MAX_SUGGESTED}`)).json();
    section.querySelector('datalist').replaceChildren(...runs.map((run) => h('option', { value: run.request_id, label: `${run.prompt_preview.slice(0, 60)} → ${run.output_preview.slice(0, 60)}` })));
  });

  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    const id = box.value.trim();
    button.disabled = true;
    state.className = 'hint';
    state.textContent = 'Calling the mod…';
    result.replaceChildren();
    try {
      const response = await fetchApi('/api/v1/mods/dry-runs', {
        method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ mod: upload(), run: id }),
      });
      const { problems, report } = await response.json();
      show(report ? report.events.filter((reply) => reply.line).map(({ file, line, exception }) => ({ file, line, message: exception, traceback: null })).slice(0, 1) : problems);
      state.textContent = report ? summary(report) : 'The mod could not be called.';
      if (!report) state.className = 'filter-error';
      const real = h('a', { class: 'button', href: `${base}/playground?${new URLSearchParams({ from: id, mod: upload().name })}`, onclick: async (click) => {
        if (click.ctrlKey || click.metaKey || click.shiftKey) return;
        click.preventDefault();
        if (await save()) location.assign(real.href);
      } }, 'Run for real in the playground');
      if (report) result.append(report.events.length ? table(report, id, go) : '', report.events.length > MAX_ROWS ? h('p', { class: 'hint' }, `${report.events.length - MAX_ROWS} more events`) : '', h('p', { class: 'links' }, real));
    } catch (error) {
      state.className = 'filter-error';
      state.textContent = `Not run: ${error.message}`;
    } finally {
      button.disabled = false;
    }
  });
}
