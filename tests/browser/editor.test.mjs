// The mod editor in a browser: EDITOR_URL is a server that accepts mods with the key MOD_KEY.
import test from 'node:test';
import assert from 'node:assert/strict';
import { eventually, expectAccessible, expectAccessiblePage, open as openPage } from './browser.mjs';
import { post } from './server.mjs';

const { EDITOR_URL, MOD_KEY } = process.env;
const skip = EDITOR_URL && MOD_KEY ? false : 'set EDITOR_URL and MOD_KEY to a server where mods can be saved';
const name = `browser-${process.pid}`;

/** Sends a body as JSON with the key. */
const send = (path, body) => post(path, body, { server: EDITOR_URL, headers: { authorization: `Bearer ${MOD_KEY}` } });

const forcedAnswer = (text) => `from thunder_mods import Prefilled, mod


@mod(events=[Prefilled])
def answer(event, actions, tokenizer):
    """Says ${text}."""
    return actions.force_output(tokenizer.encode("${text}"))
`;

/** Cookies after the first login. The server limits logins per minute. */
let login;

/** Opens a page with the key. */
async function open(path, options) {
  const page = await openPage(path, { server: EDITOR_URL, storageState: login, ...options });
  if (!login) {
    assert.match(page.url(), /\/login\?next=/);
    await page.fill('[name=key]', MOD_KEY);
    await Promise.all([page.waitForNavigation(), page.click('button')]);
    login = await page.context().storageState();
  }
  assert.equal(page.url(), EDITOR_URL + path, 'the login must lead to the requested page');
  return page;
}

/** Replaces the text of the editor. */
async function write(page, text) {
  await page.click('.cm-content');
  await page.keyboard.press('Control+a');
  await page.keyboard.insertText(text);
}

test('mod is written, corrected, saved, kept after a reload, and run', { skip }, async () => {
  const page = await open('/mods/-new');
  await page.waitForSelector('.cm-editor');
  await eventually.match(() => page.textContent('.cm-content'), /thunder_mods/, 'a new mod must begin with a template');
  await page.fill('[name=name]', name);

  await write(page, 'from thunder_mods import mod\ndef x(:\n');
  await page.waitForSelector('.problems li');
  await eventually.match(() => page.textContent('.problems li'), /Line 2.*SyntaxError/s);
  await page.waitForSelector('.cm-lint-marker-error');
  await page.click('.problems button');
  await eventually.equal(() => page.textContent('.cm-activeLineGutter'), '2', 'the editor must open at the line of the link');

  await write(page, forcedAnswer('one'));
  await page.waitForFunction(() => /No problems/.test(document.querySelector('[data-state]').textContent));
  await eventually.equal(() => page.locator('.cm-lint-marker-error').count(), 0);
  await page.keyboard.press('Control+s');
  await page.waitForURL(`**/mods/${name}`);
  await page.waitForSelector('.cm-editor');
  await eventually.equal(() => page.locator('[data-versions] li').count(), 1);

  await write(page, forcedAnswer('two'));
  await page.waitForTimeout(400);
  await page.reload();
  await page.waitForSelector('[data-draft]:not([hidden])');
  await eventually.match(() => page.textContent('.cm-content'), /Says two/, 'unsaved text must still be there');
  await page.click('.cm-content');
  await page.keyboard.press('Control+s');
  await page.waitForFunction(() => document.querySelectorAll('[data-versions] li').length === 2);
  await page.reload();
  await page.waitForSelector('.cm-editor');
  await eventually.equal(() => page.locator('[data-draft]:not([hidden])').count(), 0);
  await eventually.match(() => page.textContent('.cm-content'), /Says two/);

  await write(page, forcedAnswer('three'));
  await page.waitForTimeout(400);
  await page.click('[data-versions] li:last-child a');
  await page.waitForURL(/version=/);
  await page.waitForSelector('.cm-editor');
  await eventually.match(() => page.textContent('.cm-content'), /Says one/, 'an earlier version is shown');
  await page.locator('[data-diff] summary').focus();
  await page.keyboard.press('Enter');
  await page.waitForFunction(() => /differences? from the editor/.test(document.querySelector('[data-diff]').textContent));
  await eventually.match(() => page.textContent('.diff .removed'), /Says two/);
  await eventually.match(() => page.textContent('.diff .added'), /Says one/);
  while (await page.locator('.diff button').count()) await page.click('.diff button');
  await eventually.match(() => page.textContent('[data-diff] [role=status]'), /the same text/);
  await eventually.match(() => page.textContent('.cm-content'), /Says two/, 'the lines of the version are restored');
  await page.waitForTimeout(400);
  await eventually.match(() => page.textContent('[data-draft]'), /Unsaved changes .* Restore Discard$/);
  await Promise.all([page.waitForNavigation(), page.click('[data-earlier] a')]);
  await page.waitForSelector('.cm-editor');
  await eventually.match(() => page.textContent('.cm-content'), /Says three/, 'changes of an earlier version do not replace the draft');
  await page.click('[data-draft] button');
  await eventually.match(() => page.textContent('.cm-content'), /Says two/);

  await page.click('[data-try]');
  await page.waitForSelector(`[data-mod="${name}"]`);
  await page.fill('[data-messages] textarea', 'Hello');
  await page.click('[data-action=generate]');
  await page.waitForFunction(() => [...document.querySelectorAll('.text .token.forced')].map((t) => t.textContent).join('').includes('two'));

  await Promise.all([page.waitForURL(/\/runs\//), page.click('[data-run-line] a')]);
  await page.click(`.facts a.mod:has-text("${name}")`);
  await page.waitForURL(new RegExp(`/mods/${name}\\?version=[0-9a-f]{64}$`));
  await page.waitForSelector('.cm-editor');
  await eventually.match(() => page.textContent('.cm-content'), /Says two/, 'a run links to the version that it used');
});

test('discarded draft is replaced with the saved source', { skip }, async () => {
  const mod = `${name}-draft`;
  const upload = async (text) => (await (await send('/v1/mods', { name: mod, language: 'python', source: forcedAnswer(text) })).json()).hash;
  const first = await upload('one');
  await upload('two');
  const page = await open(`/mods/${mod}`);
  await write(page, forcedAnswer('three'));
  await page.waitForTimeout(400);
  await page.goto(`${EDITOR_URL}/mods/${mod}?version=${first}`);
  await page.waitForSelector('[data-draft]:not([hidden])');
  await write(page, forcedAnswer('four'));
  await page.keyboard.press('Control+s');
  await page.waitForFunction(() => document.querySelectorAll('[data-versions] li').length === 3);
  await page.click('[data-draft] button:has-text("Restore")');
  await eventually.match(() => page.textContent('.cm-content'), /Says three/);
  await page.click('[data-draft] button:has-text("Discard")');
  await eventually.match(() => page.textContent('.cm-content'), /Says four/);
  // After the link to the playground has saved changes of an earlier version, Back leads to the version that it saved.
  await page.goto(`${EDITOR_URL}/mods/${mod}?version=${first}`);
  await write(page, forcedAnswer('five'));
  await page.click('[data-try]');
  await page.waitForSelector(`[data-mod="${mod}"]`);
  await page.goBack();
  assert.equal(page.url(), `${EDITOR_URL}/mods/${mod}`);
});

test('version that another editor has saved is only replaced after a warning', { skip }, async () => {
  const mod = `${name}-shared`;
  const upload = async (text) => (await (await send('/v1/mods', { name: mod, language: 'python', source: forcedAnswer(text) })).json()).hash;
  const current = () => page.evaluate(async (one) => (await (await fetch(`/v1/mods/${one}/versions`)).json()).current, mod);
  await upload('one');
  const page = await open(`/mods/${mod}`);
  await page.waitForSelector('.cm-editor');
  const other = await upload('two');
  await write(page, forcedAnswer('three'));
  await page.keyboard.press('Control+s');
  await eventually.match(() => page.textContent('[data-problem]'), new RegExp(`^Not saved: this would replace version ${other.slice(0, 12)} of ${mod}, of .*, on which your text is not based\\.`));
  assert.equal(await current(), other);
  await page.click('[data-problem] a');
  await page.waitForURL(/version=/);
  await eventually.match(() => page.textContent('.cm-content'), /Says two/);
  await eventually.match(() => page.textContent('[data-draft]'), /Restore/, 'the own changes are kept');
  await page.goBack();
  await eventually.match(() => page.textContent('.cm-content'), /Says three/);
  // The restored changes are still those of the first version.
  await page.reload();
  await eventually.match(() => page.textContent('.cm-content'), /Says three/);
  await page.click('.cm-content');
  await page.keyboard.press('Control+s');
  await eventually.match(() => page.textContent('[data-problem]'), new RegExp(other.slice(0, 12)));
  assert.equal(await current(), other);
  await page.click('[data-problem] button');
  await eventually.equal(() => page.textContent('[data-state]'), 'Saved');
  assert.equal(await page.isVisible('[data-problem]'), false);
  assert.equal(await current(), await page.getAttribute('[data-version]', 'title'));
  await page.context().close();
  // A new mod does not replace one of this name.
  const page2 = await open('/mods/-new');
  await page2.waitForSelector('.cm-editor');
  await page2.fill('[name=name]', mod);
  await page2.keyboard.press('Control+s');
  await eventually.match(() => page2.textContent('[data-problem]'), /^Not saved/);
});

test('package of two files is edited, with errors at their file', { skip }, async () => {
  const mod = `${name}-package`;
  const files = {
    'helpers/text.py': 'WORD = "first"\n',
    'answers.py': 'from thunder_mods import Prefilled, mod\nfrom helpers.text import WORD\n\n\n@mod(events=[Prefilled])\ndef answers(event, actions, tokenizer):\n    return actions.force_output(tokenizer.encode(WORD))\n',
  };
  const upload = { name: mod, language: 'python', module: 'answers', source: files };
  const made = await send('/v1/mods', upload);
  assert.equal(made.status, 200, await made.text());
  const page = await open(`/mods/${mod}`);
  await page.waitForSelector('.cm-editor');
  const select = page.locator('[data-files] select');
  await eventually.deepEqual(() => select.locator('option').allTextContents(), ['answers.py', 'helpers/text.py']);
  await select.selectOption('helpers/text.py');
  await eventually.match(() => page.textContent('.cm-content'), /first/);
  await write(page, 'WORD = second\n');
  await select.selectOption('answers.py');
  await page.click('.problems button:has-text("helpers/text.py, line 1")');
  await eventually.equal(() => select.inputValue(), 'helpers/text.py', 'the link must open the file');
  await page.keyboard.press('Control+z');
  await eventually.match(() => page.textContent('.cm-content'), /"first"/, 'each file has its own undo history');
  await write(page, 'WORD = "second"\n');
  await page.fill('[data-files] input', 'more.py');
  await page.keyboard.press('Enter');
  await eventually.equal(() => select.inputValue(), 'more.py');
  await page.click('[data-files] button:has-text("Remove file")');
  await eventually.deepEqual(() => select.locator('option').allTextContents(), ['answers.py', 'helpers/text.py']);
  await page.keyboard.press('Control+s');
  await page.waitForFunction(() => document.querySelectorAll('[data-versions] li').length === 2);
  await page.reload();
  await page.waitForSelector('.cm-editor');
  await select.selectOption('helpers/text.py');
  await eventually.match(() => page.textContent('.cm-content'), /second/);
  await page.click('[data-diff] summary');
  await page.waitForSelector('.diff .removed');
  await eventually.deepEqual(() => page.locator('.diff th[scope=rowgroup]').allTextContents(), ['helpers/text.py']);
  await eventually.match(() => page.textContent('.diff .removed'), /"first"/);
  await eventually.match(() => page.textContent('.diff .added'), /"second"/);
  await select.selectOption('answers.py');
  await page.click('.diff button:has-text("Restore")');
  await eventually.match(() => page.textContent('[data-diff] [role=status]'), /the same text/);
  await eventually.equal(() => select.inputValue(), 'helpers/text.py', 'the restored file is shown');
  await eventually.match(() => page.textContent('.cm-content'), /"first"/);
  // A file that the version lacks is removed. A saved version is in the list.
  await page.fill('[data-files] input', 'more.py');
  await page.keyboard.press('Enter');
  await write(page, 'WORD = 3\n');
  await page.waitForFunction(() => document.querySelector('.diff th[scope=rowgroup]')?.textContent.startsWith('more.py'));
  const compared = page.locator('[data-diff] select');
  const selected = await compared.inputValue();
  await page.keyboard.press('Control+s');
  await page.waitForFunction(() => document.querySelectorAll('[data-diff] select option').length === 3);
  await eventually.equal(() => compared.inputValue(), selected);
  await page.click('.diff button:has-text("Restore")');
  await eventually.match(() => page.textContent('[data-diff] [role=status]'), /the same text/);
  await eventually.deepEqual(() => select.locator('option').allTextContents(), ['answers.py', 'helpers/text.py']);
  await select.selectOption('helpers/text.py');
  await page.click('.cm-content');
  await page.keyboard.press('Control+z');
  await page.waitForFunction(() => document.querySelector('.cm-content').textContent.includes('second'));
  const answer = await page.evaluate(async (used) => (await fetch('/v1/completions', { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ prompt: 'Hello', max_tokens: 3, mods: [used] }) })).json(), mod);
  assert.equal(answer.choices[0].text, 'first', 'the saved version is used');
  await eventually.ok(() => page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
});

test('error of a package in a dry run is linked to its file', { skip }, async () => {
  const mod = `${name}-broken`;
  const files = {
    'helpers/text.py': 'def word():\n    return missing\n',
    'answers.py': 'from thunder_mods import Prefilled, mod\nfrom helpers.text import word\n\n\n@mod(events=[Prefilled])\ndef answers(event, actions, tokenizer):\n    return actions.force_output(tokenizer.encode(word()))\n',
  };
  assert.equal((await send('/v1/mods', { name: mod, language: 'python', module: 'answers', source: files })).status, 200);
  const id = `package-${Date.now()}`;
  assert.equal((await send('/v1/completions', { prompt: 'Hello', max_tokens: 3, request_id: id })).status, 200);
  const page = await open(`/mods/${mod}`);
  await page.waitForSelector('[data-dry-run]:not([hidden])');
  await page.waitForFunction(async (run) => (await (await fetch(`/api/v1/runs?q=request:${run}`)).json()).runs.length === 1, id);
  await page.fill('[data-dry-run] [name=run]', id);
  await page.keyboard.press('Enter');
  await page.click('.dry-table button:has-text("helpers/text.py, line 2")');
  await eventually.equal(() => page.inputValue('[data-files] select'), 'helpers/text.py');
  await eventually.equal(() => page.textContent('.cm-activeLineGutter'), '2');
  await eventually.equal(() => page.locator('.cm-lint-marker-error').count(), 1);
});

test('draft of a new mod keeps its name, and the dry run takes a configuration', { skip }, async () => {
  const page = await open('/mods/-new', { expected: (what) => what.startsWith('400') });
  await page.waitForSelector('.cm-editor');
  const template = await page.inputValue('[name=name]');
  const mod = `${name}-named`;
  await page.fill('[name=name]', mod);
  await write(page, 'from dataclasses import dataclass\nfrom thunder_mods import Prefilled, mod\n\n\n@dataclass\nclass Config:\n    word: str\n\n\n@mod(events=[Prefilled], config=Config)\ndef answer(event, actions, tokenizer):\n    """Says a word."""\n    return actions.force_output(tokenizer.encode(event.config["word"]))\n');
  await page.waitForFunction(() => Object.keys(localStorage).some((key) => key.endsWith('-new')));
  await page.goto(`${EDITOR_URL}/mods/-new`);
  await page.waitForSelector('[data-draft]:not([hidden])');
  await eventually.equal(() => page.inputValue('[name=name]'), mod);
  const id = `config-${Date.now()}`;
  assert.equal((await send('/v1/completions', { prompt: 'Hello', max_tokens: 3, request_id: id })).status, 200);
  await page.waitForFunction(async (run) => (await (await fetch(`/api/v1/runs?q=request:${run}`)).json()).runs.length === 1, id);
  await page.fill('[data-dry-run] [name=run]', id);
  await page.fill('[data-dry-run] [name=config]', '{"word": ');
  await page.click('[data-dry-run] [type=submit]');
  await eventually.match(() => page.textContent('[data-dry-run] [role=status]'), /the configuration is not valid JSON/);
  await page.fill('[data-dry-run] [name=config]', '{"word": "configured"}');
  await page.click('[data-dry-run] [type=submit]');
  await eventually.match(() => page.textContent('.diverged'), /ForceOutput .*"configured"/);
  await page.click('[data-draft] button:has-text("Discard")');
  await eventually.equal(() => page.inputValue('[name=name]'), template);
});

test('mod is removed on its page', { skip }, async () => {
  const mod = `${name}-removed`;
  await send('/v1/mods', { name: mod, language: 'python', source: forcedAnswer('gone') });
  const page = await open(`/mods/${mod}`);
  await page.click('button:has-text("Remove…")');
  await expectAccessible(page, '[data-remove-dialog]');
  await page.click('dialog button:has-text("Keep mod")');
  await page.click('button:has-text("Remove…")');
  await Promise.all([page.waitForNavigation(), page.click('dialog button.danger')]);
  assert.equal(page.url(), `${EDITOR_URL}/mods`);
  assert.equal(await page.locator('main').getByText(mod).count(), 0);
  await page.goto(`${EDITOR_URL}/mods/${mod}`);
  await eventually.match(() => page.textContent('[data-earlier]'), /was deleted/);
});

test('mod is disabled on its page and enabled in the list', { skip }, async () => {
  const page = await open('/mods/log-top', { expected: (what) => what.startsWith('400') });
  const status = () => page.evaluate(async () => (await fetch('/v1/completions', { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ prompt: 'Hello', max_tokens: 1, mods: ['log-top'] }) })).status);
  assert.equal(await status(), 200);
  await Promise.all([page.waitForNavigation(), page.click('button:has-text("Disable")')]);
  await eventually.match(() => page.textContent('.facts'), /disabled/);
  assert.equal(await status(), 400);
  await page.goto(`${EDITOR_URL}/mods`);
  await page.getByRole('button', { name: 'Enable log-top' }).focus();
  await Promise.all([page.waitForNavigation(), page.keyboard.press('Enter')]);
  await page.getByRole('button', { name: 'Disable log-top' }).waitFor();
  assert.equal(await status(), 200);
});

test('editor receives the shortcut keys of the page, and Tab leaves it after Escape', { skip }, async () => {
  const page = await open('/mods/-new');
  await page.click('.cm-content');
  await page.keyboard.press('Control+End');
  await page.keyboard.type('# g r ?');
  assert.match(page.url(), /-new$/);
  await eventually.match(() => page.textContent('.cm-content'), /# g r \?/);
  await eventually.equal(() => page.locator('dialog[open]').count(), 0);
  await page.keyboard.press('Escape');
  await page.keyboard.press('Tab');
  await eventually.equal(() => page.evaluate(() => document.activeElement.closest('.cm-editor')), null);
});

test('pages of mods have no accessibility violations, and fit into a width of 320 pixels', { skip }, async () => {
  for (const [path, shown] of [['/mods/-new', '.cm-editor'], [`/mods/${name}`, '.cm-editor'], [`/mods/${name}-package`, '.cm-editor'], ['/mods/ban-phrases', '.facts']]) {
    const page = await open(path);
    await page.waitForSelector(shown);
    if (await page.locator('[data-diff]:not([hidden])').count()) {
      await page.click('[data-diff] summary');
      await page.waitForSelector('[data-diff] [role=status]:not(:empty)');
    }
    await expectAccessiblePage(page);
    await page.context().close();
  }
});

test('logout works on every page and removes stored values', { skip }, async () => {
  const page = await open('/nowhere', { expected: (problem) => problem.includes('404') });
  await page.evaluate(() => localStorage.setItem('draft', 'text'));
  await page.click('[aria-label="Log out"]');
  await page.waitForURL(`${EDITOR_URL}/login`);
  assert.equal(await page.evaluate(() => localStorage.length), 0);
  await page.goto(`${EDITOR_URL}/runs`);
  assert.match(page.url(), /\/login\?next=/);
});

test('dry run shows what the edited mod would do, on a phone', { skip }, async () => {
  const page = await open('/mods/-new', { width: 375 });
  await page.waitForSelector('[data-dry-run]:not([hidden])');
  const mod = `${name}-dry`;
  await page.fill('[name=name]', mod);
  await write(page, forcedAnswer('dry'));
  const id = `dry-${Date.now()}`;
  const made = await page.evaluate(async (request_id) => (await fetch('/v1/completions', { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ prompt: 'Hello', max_tokens: 3, request_id }) })).status, id);
  assert.equal(made, 200);
  // The answer may arrive before the run is stored.
  await page.waitForFunction(async (id) => (await (await fetch(`/api/v1/runs?q=request:${id}`)).json()).runs.length === 1, id);
  // Each focus loads the list of runs again.
  const option = page.locator(`#dry-runs option[value="${id}"]`);
  for (let attempt = 0; attempt < 20 && await option.count() === 0; attempt += 1) {
    await page.focus('[name=name]');
    await page.focus('[data-dry-run] [name=run]');
    await option.waitFor({ state: 'attached', timeout: 3000 }).catch(() => {});
  }
  await eventually.equal(() => option.count(), 1);
  await page.keyboard.type(id);
  await page.keyboard.press('Enter');
  await page.waitForSelector('.diverged');
  await eventually.match(() => page.textContent('.diverged'), /Prefilled first difference\s*nothing\s*ForceOutput .*"dry"/);
  await expectAccessible(page, '[data-dry-run]');
  // An error of a call is linked to its line.
  await write(page, forcedAnswer('dry').replace('return', 'return 1 / 0 or'));
  await page.click('[data-dry-run] [type=submit]');
  const line = page.locator('.dry-table button', { hasText: 'Line 7' });
  await line.click();
  await eventually.equal(() => page.locator('.cm-activeLine').textContent(), '    return 1 / 0 or actions.force_output(tokenizer.encode("dry"))');
  await write(page, forcedAnswer('dry'));
  await page.click('[data-dry-run] [type=submit]');
  await page.waitForSelector('.diverged');
  await page.click('text=Run for real in the playground');
  await page.waitForURL(/\/playground\?from=/);
  await page.waitForSelector(`[data-mods] [data-mod="${mod}"]`);
});
