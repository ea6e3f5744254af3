// The page of a mod: its source in an editor, which the server checks, and which is saved as a new version. Uses the public
// API: `POST /api/v1/mods/check` and `POST /v1/mods`.
import { base, fetchApi, sendJson } from './api.js';
import { h, toast } from './dom.js';
import { listenForShortcuts } from './keys.js';
import { packageFiles, singleFile } from './mod-files.js';
import { uploadOf } from './mod-source.js';
import { showLocalTime } from './shell.js';
import { createEditor } from './source-editor.js';

/** Delay in ms after the last keystroke before the source is checked. */
const CHECK_DELAY_MS = 700;
/** Name of a new mod in the key of its draft. */
const NEW = '-new';

const form = document.querySelector('form[data-editor]');
/** The name is empty for a new mod. */
const { name, hash } = form.dataset;
/** Text area of a source that is one text; undefined for a package of files. */
const textarea = form.elements.source;
const files = [...form.querySelectorAll('[data-file]')];
const saveButton = form.querySelector('[type=submit]');
const state = form.querySelector('[data-state]');
const problemList = form.querySelector('[data-problems]');
const errorBox = document.querySelector('[data-problem]');
const draftBox = document.querySelector('[data-draft]');
const canSave = form.dataset.maySave === 'true';
/** A source is a text, or for a package the texts of its files by path. */
const initialSource = textarea ? textarea.value : Object.fromEntries(files.map((file) => [file.dataset.file, file.textContent]));
const isInitial = (source) => JSON.stringify(source) === JSON.stringify(initialSource);
/** Key of the draft in `localStorage`. */
const draftKey = `thunder.mod.${name || NEW}`;
/** The saved source, or null if the page shows a source that the server refused to save. */
let savedSource = errorBox.hidden ? initialSource : null;
let checkTimer = 0;
/** AbortController of the newest check. */
let pendingCheck = null;
let isSaving = false;
/** The version that a save replaces: the one that runs used when the user began to edit, or a newer one that the user knows. */
let replaced = { name, hash: form.dataset.current };

const editor = createEditor(form.querySelector('[data-code]'), {
  text: textarea?.value ?? '', nonce: form.dataset.nonce, readonly: !canSave, label: 'Source of the mod, in Python', changed,
});
if (textarea) textarea.hidden = true;
for (const file of form.querySelectorAll('[data-file], [data-file-title]')) file.remove();
form.querySelector('[data-tab-hint]').hidden = !canSave;
document.querySelector('label[for=source]')?.remove();
const source = textarea ? singleFile(editor) : packageFiles(form.querySelector('[data-files]'), initialSource, editor, { canSave, changed });
saveButton.disabled = !canSave;

const isChanged = () => JSON.stringify(source.value) !== JSON.stringify(savedSource);
/** Returns the body of a request with the edited mod. */
const upload = () => uploadOf(JSON.parse(form.dataset.previous), form.elements.name.value.trim(), source.value);

function setState(text, tone = '') {
  state.textContent = text;
  state.className = `edit-state ${tone}`;
}

function showError(text) {
  errorBox.hidden = !text;
  errorBox.replaceChildren(h('p', {}, text));
}

// Unsaved changes are stored in the browser as a draft, until they are saved or discarded.

let draftTimer = 0;
/** False if the newest changes are not stored. */
let isDraftStored = true;
/** True while the stored draft is only offered. Changes are not stored then, because they would replace it. */
let isDraftOffered = false;

function storeDraft() {
  clearTimeout(draftTimer);
  draftTimer = 0;
  isDraftStored = !isDraftOffered;
  if (isDraftOffered) return;
  try {
    if (isChanged()) localStorage.setItem(draftKey, JSON.stringify({ name: form.elements.name.value, text: source.value, base: form.dataset.hash, replaces: replaced.hash, at: Date.now() }));
    else localStorage.removeItem(draftKey);
  } catch {
    isDraftStored = false;
  }
}
addEventListener('pagehide', () => { if (draftTimer) storeDraft(); });
addEventListener('beforeunload', (event) => {
  if (draftTimer) storeDraft();
  if (!isDraftStored && isChanged()) event.preventDefault();
});

/** Restores the draft of an earlier visit, or offers to restore it. */
function restoreDraft() {
  let draft = null;
  try { draft = JSON.parse(localStorage.getItem(draftKey)); } catch { /* unreadable, so there is no draft */ }
  if (typeof draft?.text !== typeof initialSource || !draft.text || isInitial(draft.text) || !canSave) return;
  /** The version that a save replaces after the draft is discarded. */
  let before = replaced;
  const restore = () => {
    before = replaced;
    replaced = { name, hash: draft.replaces ?? draft.base };
    source.value = draft.text;
    form.elements.name.value = draft.name ?? form.elements.name.defaultValue;
  };
  // On the page of an earlier version or of a template, the user expects that source, so the draft is only offered.
  isDraftOffered = new URL(location).search !== '' || (!name && document.referrer.includes('/mods/-new'));
  const discardButton = h('button', { type: 'button', onclick: () => {
    localStorage.removeItem(draftKey);
    draftBox.hidden = true;
    if (isDraftOffered) {
      isDraftOffered = false;
      storeDraft();
    } else {
      replaced = before;
      source.value = savedSource ?? initialSource;
      form.elements.name.value = form.elements.name.defaultValue;
    }
  } }, 'Discard');
  const restoreButton = h('button', { type: 'button', onclick: () => {
    isDraftOffered = false;
    restore();
    offer.remove();
  } }, 'Restore');
  const offer = h('span', {}, 'Restore or discard them first: until then, changes on this page are not kept. ', restoreButton);
  const time = new Date(draft.at).toLocaleString();
  const origin = draft.base && draft.base !== hash ? `, based on version ${draft.base.slice(0, 12)}` : '';
  draftBox.replaceChildren(h('p', {}, `Unsaved changes of ${time}${origin}. `, isDraftOffered && offer, ' ', discardButton));
  draftBox.hidden = false;
  if (!isDraftOffered) restore();
}

// Results of the server's checks.

function showProblems(problems) {
  source.mark(problems);
  problemList.replaceChildren(...problems.map(({ file, line, message, traceback }) => h('li', {},
    line ? h('button', { type: 'button', onclick: () => source.go({ file, line }) }, file ? `${file}, line ${line}` : `Line ${line}`) : null,
    h('span', {}, message),
    traceback ? h('details', {}, h('summary', { class: 'hint' }, 'Traceback'), h('pre', { class: 'trace', tabindex: '0' }, traceback)) : null)));
  const { length } = problems;
  setState(length ? `${length} problem${length === 1 ? '' : 's'}` : isChanged() ? 'No problems, not saved' : 'No problems', length ? 'err' : '');
}

/** Sends the source to the server and shows the problems that it finds. Returns them, or null if the check failed. */
async function check() {
  clearTimeout(checkTimer);
  checkTimer = 0;
  pendingCheck?.abort();
  const controller = new AbortController();
  pendingCheck = controller;
  setState('Checking…');
  try {
    const response = await sendJson('/api/v1/mods/check', upload(), { signal: controller.signal });
    const { problems } = await response.json();
    if (pendingCheck === controller) showProblems(problems);
    return problems;
  } catch (error) {
    if (pendingCheck !== controller || controller.signal.aborted) return null;
    if (error.status === 429) checkTimer = setTimeout(check, 3 * CHECK_DELAY_MS);
    else setState(`Not checked: ${error.message}`, 'err');
    return null;
  }
}

/** The comparison with a version; null until the user opens it. */
let differences = null;

/** Reacts to a change of the source or the name. */
function changed() {
  if (textarea) textarea.value = editor.text;
  differences?.sourceChanged();
  clearTimeout(draftTimer);
  draftTimer = setTimeout(storeDraft, 250);
  setState('Changed');
  clearTimeout(checkTimer);
  checkTimer = setTimeout(check, CHECK_DELAY_MS);
}
form.elements.name.addEventListener('input', changed);

/** Returns the version of a mod that a save would replace, if the user does not know it, or undefined. */
async function unknownVersion(target) {
  const { mods } = await (await fetchApi('/v1/mods')).json();
  return mods.find((mod) => mod.name === target && mod.origin === 'uploaded' && (target !== replaced.name || mod.hash !== replaced.hash));
}

/** Shows that a save would replace a version that the user does not know. */
function warnOfVersion({ name: target, hash: newer, registered_at: at, registered_by: by }, next) {
  const saveAnyway = () => {
    replaced = { name: target, hash: newer };
    save(next);
  };
  const saved = `of ${new Date(at).toLocaleString()}${by ? ` by ${by}` : ''}`;
  showError(`Not saved: this would replace version ${newer.slice(0, 12)} of ${target}, ${saved}, on which your text is not based.`);
  errorBox.append(h('p', { class: 'links' },
    h('a', { href: `${base}/mods/${encodeURIComponent(target)}?version=${newer}` }, 'Show it'),
    h('button', { type: 'button', onclick: saveAnyway }, 'Replace it')));
  setState('Not saved', 'err');
}

/** Saves the source as a new version, and then opens the page `next` if there is one, or else the page of a new mod. */
async function save(next) {
  if (!canSave || isSaving || !form.reportValidity()) return;
  clearTimeout(checkTimer);
  pendingCheck?.abort();
  isSaving = true;
  saveButton.disabled = true;
  const sent = source.value;
  setState('Saving…');
  showError('');
  try {
    const unknown = await unknownVersion(upload().name);
    if (unknown) {
      warnOfVersion(unknown, next);
      return;
    }
    const response = await sendJson('/v1/mods', upload());
    const version = await response.json();
    replaced = version;
    savedSource = sent;
    storeDraft();
    draftBox.hidden = !isDraftOffered;
    if (version.name !== name) {
      location.assign(next ?? `${base}/mods/${encodeURIComponent(version.name)}`);
      return;
    }
    showProblems([]);
    setState('Saved');
    addVersion(version.hash);
    toast(`${version.unchanged ? 'Already saved as' : 'Saved as'} version ${version.hash.slice(0, 12)}${version.enabled ? '' : '; the mod is disabled'}`);
    if (next) location.assign(next);
  } catch (error) {
    const problems = error.status === 400 ? await check() : null;
    if (!problems?.length) {
      showError(`Not saved: ${error.message}`);
      setState('Not saved', 'err');
    }
  } finally {
    isSaving = false;
    saveButton.disabled = false;
  }
}

/** Adds the saved version at the top of the list of versions, and shows it as the current one. */
function addVersion(newHash) {
  const versions = document.querySelector('[data-versions]');
  const href = `${base}/mods/${encodeURIComponent(name)}`;
  const short = newHash.slice(0, 12);
  for (const link of versions.querySelectorAll('a')) {
    link.removeAttribute('aria-current');
    link.closest('li').classList.remove('current-version');
    if (link.title === newHash) link.closest('li').remove();
    else link.href = `${href}?version=${link.title}`;
  }
  const time = h('time', { class: 'hint', datetime: new Date().toISOString() });
  showLocalTime(time);
  versions.prepend(h('li', { class: 'current-version' }, h('a', { href, 'aria-current': 'true', title: newHash }, h('code', {}, short)), ' ', time));
  const version = document.querySelector('[data-version]');
  version.textContent = short;
  version.title = newHash;
  form.dataset.hash = newHash;
  history.replaceState(null, '', href);
  document.querySelector('[data-earlier]')?.remove();
  differences?.versionsChanged();
}

form.addEventListener('submit', (event) => {
  event.preventDefault();
  save();
});
listenForShortcuts(['editor'], (action) => {
  if (action !== 'save') return false;
  save();
  return true;
});
// The playground uses the saved version, so the link to it saves the changes first.
document.querySelector('[data-try]')?.addEventListener('click', (event) => {
  if (!canSave || !isChanged() || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  save(event.currentTarget.href);
});

const dryRun = document.querySelector('[data-dry-run]');
if (dryRun && canSave) {
  import('./dry-run.js').then(({ setUpDryRun }) => {
    setUpDryRun(dryRun, { upload, showProblems, go: (place) => source.go(place), saveAndOpen: (href) => (isChanged() ? save(href) : location.assign(href)) });
    dryRun.hidden = false;
  });
}

// The comparison with a version; its code is loaded when the user opens it.
const diff = document.querySelector('[data-diff]');
if (diff) {
  diff.addEventListener('toggle', async () => {
    const { showDifferences } = await import('./mod-diff.js');
    const versions = () => [...document.querySelectorAll('[data-versions] li')].map((item) => ({ hash: item.querySelector('a').title, label: item.textContent.trim().replace(/\s+/g, ' ') }));
    differences = showDifferences(diff, { name, hash: form.dataset.hash, versions, source, canSave });
  }, { once: true });
  diff.hidden = false;
}

restoreDraft();
if (canSave && !errorBox.hidden) check();
