// The comparison of a mod's source in its editor with one of its versions. Buttons restore lines of the version.
import { fetchApi } from './api.js';
import { h } from './dom.js';
import { align } from './diff.js';

/** Equal lines shown before and after a difference. */
const CONTEXT_LINES = 3;
/** Delay in ms after the last change of the source before the differences are computed again. */
const DELAY_MS = 250;

const linesOf = (text) => text.split('\n');

/** Returns the text `b` with one difference undone: its lines are replaced by those of `a`. `block` is from a row of `diffRows(a, b)`. Pure. */
export function restoreBlock(a, b, block) {
  const lines = linesOf(b);
  lines.splice(block.b[0], block.b[1] - block.b[0], ...linesOf(a).slice(...block.a));
  return lines.join('\n');
}

/**
 * Returns the differences between two texts as rows. A line is `{kind: 'same' | 'removed' | 'added', a, b, text}`, with its
 * numbers in both texts, from 1. `{kind: 'block', block}` comes before each difference, and `{kind: 'skipped', count}` stands
 * for equal lines that are not shown. Equal texts have no rows. Pure.
 */
export function diffRows(a, b) {
  const [linesA, linesB] = [linesOf(a), linesOf(b)];
  const blocks = align(linesA, linesB);
  if (blocks.every(({ same }) => same)) return [];
  return blocks.flatMap((block, index) => {
    const { same, a: [fromA, toA], b: [fromB, toB] } = block;
    if (!same) {
      return [
        { kind: 'block', block },
        ...linesA.slice(fromA, toA).map((text, i) => ({ kind: 'removed', a: fromA + i + 1, text })),
        ...linesB.slice(fromB, toB).map((text, i) => ({ kind: 'added', b: fromB + i + 1, text })),
      ];
    }
    const equal = linesA.slice(fromA, toA).map((text, i) => ({ kind: 'same', a: fromA + i + 1, b: fromB + i + 1, text }));
    const [head, tail] = [index === 0 ? 0 : CONTEXT_LINES, index === blocks.length - 1 ? 0 : CONTEXT_LINES];
    const count = equal.length - head - tail;
    if (count < 2) return equal;
    return [...equal.slice(0, head), { kind: 'skipped', count }, ...equal.slice(equal.length - tail)];
  });
}

/** Returns the texts of a source by path; a source that is one text has the path `''`. */
const filesOf = (source) => (typeof source === 'string' ? { '': source } : source);

/**
 * Returns the differences between two sources as the rows of `diffRows`, each with its `path`. In a package, a row
 * `{kind: 'file', path, note}` comes before those of each file. Pure.
 */
export function sourceRows(version, edited) {
  const [filesA, filesB] = [filesOf(version), filesOf(edited)];
  return [...new Set([...Object.keys(filesA), ...Object.keys(filesB)])].sort().flatMap((path) => {
    const note = !(path in filesA) ? 'only in the editor' : !(path in filesB) ? 'only in the version' : '';
    const rows = diffRows(filesA[path] ?? '', filesB[path] ?? '').map((row) => ({ ...row, path }));
    return path && (rows.length || note) ? [{ kind: 'file', path, note }, ...rows] : rows;
  });
}

const SIGNS = { same: ' ', removed: '−', added: '+' };
const NAMES = { removed: 'only in the version: ', added: 'only in the editor: ' };

/** Returns the table row of a line. */
function lineRow({ kind, a, b, text }) {
  return h('tr', { class: kind }, h('td', { class: 'num' }, a ?? ''), h('td', { class: 'num' }, b ?? ''),
    h('td', {}, h('span', { 'aria-hidden': 'true' }, SIGNS[kind]), NAMES[kind] ? h('span', { class: 'visually-hidden' }, NAMES[kind]) : ''),
    h('td', {}, h('code', {}, text)));
}

/** Returns the table row before the differences of a file. */
function fileRow({ path, note }) {
  return h('tr', { class: 'block' }, h('th', { colspan: '4', scope: 'rowgroup' }, path, note ? h('span', { class: 'hint' }, ` ${note}`) : ''));
}

/**
 * Fills the section with the list of versions that `versions()` returns (`{hash, label}`, newest first), and the differences
 * between the selected one and `source`, the one in the editor (see `mod-files.js`). Buttons that restore lines are only shown
 * if `canSave` is true. Returns `{sourceChanged(), versionsChanged()}`, to be called after each such change.
 */
export function showDifferences(section, { name, hash, versions, source, canSave }) {
  const select = h('select');
  const listVersions = (selected) => {
    select.replaceChildren(...versions().map((one) => h('option', { value: one.hash, selected: one.hash === selected }, one.label)));
  };
  listVersions((versions().find((one) => one.hash !== hash) ?? versions()[0]).hash);
  const state = h('span', { class: 'hint', role: 'status' });
  const body = h('tbody');
  const box = h('div', { class: 'table-box code', tabindex: '0', role: 'region', 'aria-label': 'Differences' }, h('table', { class: 'diff' },
    h('thead', { class: 'visually-hidden' }, h('tr', {}, ['Line of the version', 'Line in the editor', 'Difference', 'Text'].map((title) => h('th', { scope: 'col' }, title)))), body));
  section.append(h('p', { class: 'diff-bar' }, h('label', {}, 'Version ', select), ' ', state), box);
  /** Loaded sources of versions by hash. */
  const sources = new Map();
  let timer = 0;

  /** Returns the table row before a difference, with the button that restores the lines of the version. */
  function blockRow(versionSource, { path, block }) {
    const restore = () => {
      const [files, edited] = [filesOf(versionSource), filesOf(source.value)];
      const text = restoreBlock(files[path] ?? '', edited[path] ?? '', block);
      // The last file of a package is not removed.
      if (text || path in files || Object.keys(edited).length < 2) source.replace(path, text);
      else source.remove(path);
      draw(versionSource);
      (body.querySelector('button') ?? select).focus();
    };
    // A package has no text without a path, and a text has no files.
    const canRestore = canSave && (path === '') === (typeof source.value === 'string');
    return h('tr', { class: 'block' }, h('td', { colspan: '4' }, canRestore ? h('button', { type: 'button', onclick: restore }, 'Restore these lines') : ''));
  }

  function draw(versionSource) {
    clearTimeout(timer);
    const rows = sourceRows(versionSource, source.value);
    // An empty file that only one side has is a difference without lines.
    const count = rows.filter(({ kind }) => kind === 'block').length || rows.length;
    state.textContent = count ? `${count} difference${count === 1 ? '' : 's'} from the editor` : 'The editor has the same text';
    box.hidden = !count;
    body.replaceChildren(...rows.map((row) => {
      if (row.kind === 'block') return blockRow(versionSource, row);
      if (row.kind === 'file') return fileRow(row);
      if (row.kind === 'skipped') return h('tr', { class: 'block hint' }, h('td', { colspan: '4' }, `${row.count} equal lines`));
      return lineRow(row);
    }));
  }

  /** Shows the differences from the selected version, whose source is loaded on first use. */
  async function compare() {
    const version = select.value;
    try {
      if (!sources.has(version)) {
        const response = await fetchApi(`/v1/mods/${encodeURIComponent(name)}/source?${new URLSearchParams({ version })}`);
        const isPackage = response.headers.get('content-type').includes('json');
        sources.set(version, await (isPackage ? response.json() : response.text()));
      }
      if (select.value === version) draw(sources.get(version));
    } catch (error) {
      state.textContent = `The version could not be loaded: ${error.message}`;
    }
  }
  select.addEventListener('change', compare);
  compare();
  return {
    sourceChanged() {
      clearTimeout(timer);
      timer = setTimeout(compare, DELAY_MS);
    },
    versionsChanged: () => listVersions(select.value),
  };
}
