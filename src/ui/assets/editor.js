// The page of a mod: its source in an editor, the server's checks, and saving a new version. Uses the public API: POST
// /api/v1/mods/check and POST /v1/mods.
import { base, fetchApi, h, toast } from './dom.js';
import { listen } from './keys.js';
import { packageFiles, singleFile } from './mod-files.js';
import { uploadOf } from './mod-source.js';
import { showLocalTime } from './shell.js';
import { createEditor } from './source-view.js';

/** Delay in ms after the last keystroke before the source is checked. */
const CHECK_DELAY_MS = 700;
/** Name of a new mod in the key of its draft in `localStorage`. */
const NEW = '-new';

const form = document.querySelector('form[data-editor]');

setUp();

function setUp() {
  const { name, hash } = form.dataset;
  const textarea = form.elements.source;
  const files = [...form.querySelectorAll('[data-file]')];
  const button = form.querySelector('[type=submit]');
  const state = form.querySelector('[data-state]');
  const list = form.querySelector('[data-problems]');
  const problem = document.querySelector('[data-problem]');
  const draftBox = document.querySelector('[data-draft]');
  const canSave = form.dataset.may === 'true';
  const initialSource = textarea ? textarea.value : Object.fromEntries(files.map((file) => [file.dataset.file, file.textContent]));
  const isInitial = (source) => JSON.stringify(source) === JSON.stringify(initialSource);
  const draftKey = `thunder.mod.${name || NEW}`;
  let saved = problem.hidden ? initialSource : null;
  let timer = 0;
  let pendingCheck = null;
  let saving = false;

  const editor = createEditor(form.querySelector('[data-code]'), {
    text: textarea?.value ?? '', nonce: form.dataset.nonce, readonly: !canSave, label: 'Source of the mod, in Python', changed,
  });
  if (textarea) textarea.hidden = true;
  for (const file of form.querySelectorAll('[data-file], [data-file-title]')) file.remove();
  form.querySelector('[data-tab-hint]').hidden = !canSave;
  document.querySelector('label[for=source]')?.remove();
  const mod = textarea ? singleFile(editor) : packageFiles(form.querySelector('[data-files]'), initialSource, editor, { canSave, changed });
  button.disabled = !canSave;

  const isChanged = () => JSON.stringify(mod.value) !== JSON.stringify(saved);
  const upload = () => uploadOf(JSON.parse(form.dataset.previous), form.elements.name.value.trim(), mod.value);

  function setState(text, tone = '') {
    state.textContent = text;
    state.className = `edit-state ${tone}`;
  }

  function showError(text) {
    problem.hidden = !text;
    problem.replaceChildren(h('p', {}, text));
  }

  // A draft is kept until it is saved or discarded.

  let draftTimer = 0;
  let isStored = true;
  function storeDraft() {
    clearTimeout(draftTimer);
    draftTimer = 0;
    try {
      if (isChanged()) localStorage.setItem(draftKey, JSON.stringify({ text: mod.value, base: form.dataset.hash, at: Date.now() }));
      else localStorage.removeItem(draftKey);
      isStored = true;
    } catch {
      isStored = false;
    }
  }
  addEventListener('pagehide', () => { if (draftTimer) storeDraft(); });
  addEventListener('beforeunload', (event) => {
    if (draftTimer) storeDraft();
    if (!isStored && isChanged()) event.preventDefault();
  });

  /** Offers or restores the draft of an earlier visit. */
  function restoreDraft() {
    let draft = null;
    try { draft = JSON.parse(localStorage.getItem(draftKey)); } catch { /* an unknown format: no draft */ }
    if (typeof draft?.text !== typeof initialSource || !draft.text || isInitial(draft.text) || !canSave) return;
    const discardButton = h('button', { type: 'button', onclick: () => {
      localStorage.removeItem(draftKey);
      mod.value = initialSource;
      draftBox.hidden = true;
    } }, 'Discard');
    const restoreButton = h('button', { type: 'button', onclick: () => { mod.value = draft.text; restoreButton.remove(); } }, 'Restore');
    const at = new Date(draft.at).toLocaleString();
    // The draft is not restored automatically on the page of an earlier version or a template.
    const isAutomatic = new URL(location).search === '' && (name || !document.referrer.includes('/mods/-new'));
    const origin = draft.base && draft.base !== hash ? `, based on version ${draft.base.slice(0, 12)}` : '';
    draftBox.replaceChildren(h('p', {}, `Unsaved changes of ${at}${origin}. `, isAutomatic ? null : restoreButton, ' ', discardButton));
    draftBox.hidden = false;
    if (isAutomatic) mod.value = draft.text;
  }

  // Results of the server's checks.

  function showProblems(problems) {
    mod.mark(problems);
    list.replaceChildren(...problems.map(({ file, line, message, traceback }) => h('li', {},
      line ? h('button', { type: 'button', onclick: () => mod.go({ file, line }) }, file ? `${file}, line ${line}` : `Line ${line}`) : null,
      h('span', {}, message),
      traceback ? h('details', {}, h('summary', { class: 'hint' }, 'Traceback'), h('pre', { class: 'trace', tabindex: '0' }, traceback)) : null)));
    const { length } = problems;
    setState(length ? `${length} problem${length === 1 ? '' : 's'}` : isChanged() ? 'No problems, not saved' : 'No problems', length ? 'err' : '');
  }

  async function check() {
    clearTimeout(timer);
    timer = 0;
    pendingCheck?.abort();
    const controller = new AbortController();
    pendingCheck = controller;
    setState('Checking…');
    try {
      const response = await fetchApi('/api/v1/mods/check', {
        method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(upload()), signal: controller.signal,
      });
      const { problems } = await response.json();
      if (pendingCheck === controller) showProblems(problems);
      return problems;
    } catch (error) {
      if (pendingCheck !== controller || controller.signal.aborted) return null;
      if (error.status === 429) timer = setTimeout(check, 3 * CHECK_DELAY_MS);
      else setState(`Not checked: ${error.message}`, 'err');
      return null;
    }
  }

  /** Updates the comparison with a version, once it is open. */
  let updateDiff = null;

  function changed() {
    if (textarea) textarea.value = editor.text;
    updateDiff?.();
    clearTimeout(draftTimer);
    draftTimer = setTimeout(storeDraft, 250);
    setState('Changed');
    clearTimeout(timer);
    timer = setTimeout(check, CHECK_DELAY_MS);
  }
  form.elements.name.addEventListener('input', changed);

  async function save() {
    if (!canSave || saving) return false;
    if (!form.reportValidity()) return false;
    clearTimeout(timer);
    pendingCheck?.abort();
    saving = true;
    button.disabled = true;
    const sent = mod.value;
    setState('Saving…');
    showError('');
    try {
      const response = await fetchApi('/v1/mods', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(upload()) });
      const done = await response.json();
      saved = sent;
      storeDraft();
      draftBox.hidden = true;
      if (done.name !== name) {
        localStorage.removeItem(draftKey);
        location.assign(`${base}/mods/${encodeURIComponent(done.name)}`);
        return true;
      }
      showProblems([]);
      setState('Saved');
      addVersion(done.hash);
      toast(`${done.unchanged ? 'Already saved as' : 'Saved as'} version ${done.hash.slice(0, 12)}${done.enabled ? '' : '; the mod is disabled'}`);
      return true;
    } catch (error) {
      saving = false;
      const problems = error.status === 400 ? await check() : null;
      if (!problems?.length) {
        showError(`Not saved: ${error.message}`);
        setState('Not saved', 'err');
      }
      return false;
    } finally {
      saving = false;
      button.disabled = false;
    }
  }

  /** Adds the saved version at the top of the list of versions. */
  function addVersion(newHash) {
    const versions = document.querySelector('[data-versions]');
    const here = `${base}/mods/${encodeURIComponent(name)}`;
    const short = newHash.slice(0, 12);
    for (const link of versions.querySelectorAll('a')) {
      link.removeAttribute('aria-current');
      link.closest('li').classList.remove('now');
      if (link.title === newHash) link.closest('li').remove();
      else link.href = `${here}?version=${link.title}`;
    }
    const time = h('time', { class: 'hint', datetime: new Date().toISOString() });
    showLocalTime(time);
    versions.prepend(h('li', { class: 'now' }, h('a', { href: here, 'aria-current': 'true', title: newHash }, h('code', {}, short)), ' ', time));
    const version = document.querySelector('[data-version]');
    version.textContent = short;
    version.title = newHash;
    form.dataset.hash = newHash;
    history.replaceState(null, '', here);
    document.querySelector('[data-earlier]')?.remove();
  }

  form.addEventListener('submit', (event) => {
    event.preventDefault();
    save();
  });
  listen(['editor'], (action) => {
    if (action !== 'save') return false;
    save();
    return true;
  });
  // The playground uses the saved version, so changes are saved first.
  document.querySelector('[data-try]')?.addEventListener('click', async (event) => {
    if (!canSave || !isChanged() || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const { href } = event.currentTarget;
    if (await save()) location.assign(href);
  });

  const dry = document.querySelector('[data-dry-run]');
  if (dry && canSave) {
    import('./dry-run.js').then(({ dryRun }) => {
      dryRun(dry, { upload, show: showProblems, go: (place) => mod.go(place), save: async () => !isChanged() || save() });
      dry.hidden = false;
    });
  }

  // Loaded when it is first opened.
  const diff = document.querySelector('[data-diff]');
  diff?.addEventListener('toggle', async () => {
    const { showDifferences } = await import('./mod-diff.js');
    const versions = [...document.querySelectorAll('[data-versions] li')].map((item) => ({ hash: item.querySelector('a').title, label: item.textContent.trim().replace(/\s+/g, ' ') }));
    updateDiff = showDifferences(diff, { name, hash: form.dataset.hash, versions, mod, canSave });
  }, { once: true });
  diff?.toggleAttribute('hidden', false);

  restoreDraft();
  if (canSave && !problem.hidden) check();
}
