// Runs that the server generates itself: with mods, attention, tools and formats. THUNDER_URL runs the demo model, --attention on.
import test, { after, before } from 'node:test';
import assert from 'node:assert/strict';
import net from 'node:net';
import { URL_, launch, open, quiet, ready } from './browser.mjs';

let browser;
before(async () => { browser = await launch(); });
after(() => browser?.close());

const post = (path, body) => fetch(URL_ + path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) });

/** Generates a run and waits until it is stored; its id. */
async function generate(fields) {
  const response = await post('/v1/chat/completions', { messages: [{ role: 'user', content: 'Tell me a short story about a girl and a cat.' }], seed: 1, max_tokens: 60, ...fields });
  const answer = await response.json();
  assert.equal(response.status, 200, JSON.stringify(answer));
  return stored(answer.thunder.run_id);
}

async function stored(id) {
  for (;;) {
    const { run } = await (await fetch(`${URL_}/api/v1/runs/${id}`)).json();
    if (run && run.status !== 'running') return id;
    await new Promise((resolve) => setTimeout(resolve, 30));
  }
}

const banned = (...phrases) => [{ name: 'ban-phrases', config: { phrases, whole_words: true } }];
const wide = (page, selector) => page.evaluate((s) => { const { scrollWidth, clientWidth } = document.querySelector(s); return scrollWidth - clientWidth; }, selector);

test('the first starter shows a backtrack, the same one every time', async () => {
  const answers = [];
  for (let i = 0; i < 2; i += 1) {
    const page = await open('/playground');
    await page.fill('input[name=temperature]', '2');
    await page.fill('input[name=seed]', String(100 + i));
    await page.click('.starters button >> nth=0');
    await page.waitForFunction(() => /tokens/.test(document.querySelector('[data-state]').textContent), null, { timeout: 60000 });
    assert.ok(await page.locator('.chip:visible').count() >= 1, 'tokens were taken back');
    answers.push(await page.evaluate(() => [...document.querySelectorAll('.t')].map((t) => t.textContent).join('')));
    await page.context().close();
  }
  assert.equal(answers[0], answers[1]);
  await quiet();
});

test('keys that find nothing further say so', async () => {
  const id = await generate({ mods: banned('the', 'and') });
  const page = await open(`/runs/${id}`);
  await ready(page);
  for (const [key, name] of [['b', 'backtrack'], ['.', 'mod action'], ['s', 'surprise']]) {
    await page.keyboard.press('End');
    await page.keyboard.press(key);
    assert.equal(await page.textContent('[data-toast]'), `No ${name} after this.`);
    await page.keyboard.press('Home');
    await page.keyboard.press(key === '.' ? ',' : key.toUpperCase());
    assert.equal(await page.textContent('[data-toast]'), `No ${name} before this.`);
  }
  await page.keyboard.press('e');
  assert.equal(await page.textContent('[data-toast]'), 'No error in this run.');
  await page.context().close();
  await quiet();
});

for (const width of [1280, 375]) {
  test(`what a mod masked fits the panel, and labels of lanes are clear of marks (${width} px)`, async () => {
    const id = await generate({ mods: [...banned('the', 'and'), { name: 'log-top' }] });
    const page = await open(`/runs/${id}`, { width });
    await ready(page);
    await page.keyboard.press('Home');
    await page.keyboard.press('.');
    await page.keyboard.press('.');
    await page.waitForSelector('.panel .why:has-text("masked by ban-phrases")');
    assert.equal(await wide(page, '.panel'), 0);
    assert.equal(await wide(page, 'html'), 0);
    const lanes = await page.locator('.lane').evaluateAll((all) => all.map((lane) => [lane.querySelector('b').getBoundingClientRect().bottom, lane.querySelector('canvas').getBoundingClientRect().top]));
    assert.equal(lanes.length, 2);
    for (const [label, marks] of lanes) assert.ok(label <= marks, `the label ends at ${label}, the marks begin at ${marks}`);
    await page.context().close();
    await quiet();
  });
}

test('compared runs show what mods and the sampler made of each candidate', async () => {
  const [a, b] = [await generate({ mods: banned('the', 'and') }), await generate({})];
  const page = await open(`/compare?a=${a}&b=${b}`, { width: 375 });
  await page.waitForSelector('.alts.both');
  assert.deepEqual(await page.locator('.alts.both thead th').allTextContents(), ['token', 'run', 'model', 'after mods', 'drawn from']);
  const chosen = await page.locator('.alts.both tr.won').evaluateAll((rows) => rows.map((row) => [...row.querySelectorAll('td')].map((td) => td.textContent)));
  assert.equal(chosen.length, 2, JSON.stringify(chosen));
  const [ofA, ofB] = ['A ✓', 'B ✓'].map((name) => chosen.find(([side]) => side === name));
  assert.match(ofA.join(' '), /%.*%.*%/, 'a mod changed what A was drawn from');
  assert.equal(ofB[2], '·', 'no mod changed B');
  assert.equal(await wide(page, '.panel'), 0);
  await page.context().close();
  await quiet();
});

test('later steps are shaded by how much they looked at a token, in the chosen layer', async () => {
  const id = await generate({ attention: true, max_tokens: 20 });
  const step = async (at, view) => (await (await fetch(`${URL_}/api/v1/runs/${id}/attention?at=${at}&${view}`)).json()).attention;
  const page = await open(`/runs/${id}`);
  await ready(page);
  await page.keyboard.press('Home');
  for (let i = 0; i < 3; i += 1) await page.keyboard.press('ArrowRight');
  await page.keyboard.press('a');
  await page.waitForSelector('.tops li');
  const position = Number(await page.evaluate(() => [...document.querySelectorAll('.tok-facts div')].find((div) => div.querySelector('dt').textContent === 'position').querySelector('dd').textContent));
  await page.selectOption('select[aria-label=Direction]', 'forth');
  const { row_len: first, layer_ids: layers } = await step(1, 'view=mean');
  const shown = () => page.evaluate(() => [...document.querySelectorAll('.tops li')].map((li) => Number(li.firstChild.textContent)));
  const orders = new Set();
  for (const [choice, view] of [['mean', 'view=mean'], ...layers.map((layer) => [`layer:${layer}`, `view=layer&layer=${layer}`])]) {
    // One step draws one token: the step of the token at `first + k` is the k-th, its ForwardPass event 1 + 3 k.
    const expected = [];
    for (let at = 1; at < 60; at += 3) {
      const attention = await step(at, view);
      if (attention?.sequence_order === at && attention.row_len > position) expected.push([attention.row_len, attention.values[position]]);
    }
    expected.sort((x, y) => y[1] - x[1]);
    await page.selectOption('select[aria-label="Which attention"]', choice);
    await page.waitForFunction((count) => new RegExp(`^${count} later step[^…]*$`).test([...document.querySelectorAll('.panel .hint')].find((p) => /later step/.test(p.textContent))?.textContent ?? ''), expected.length);
    assert.equal((await shown())[0], expected[0][0], `${choice}: the step that looked most`);
    orders.add(expected.map(([pos]) => pos).join());
  }
  assert.ok(orders.size > 1, 'layers differ');
  assert.equal(first, (await step(1, 'view=max')).row_len);
  await page.context().close();
  await quiet();
});

test('the playground keeps the tools, format and biases of a run', async () => {
  const fields = {
    tools: [{ type: 'function', function: { name: 'weather', description: 'Tells the weather.', parameters: { type: 'object', properties: { city: { type: 'string' } } } } }],
    tool_choice: 'none',
    response_format: { type: 'json_schema', json_schema: { name: 'n', schema: { type: 'object', properties: { a: { type: 'integer' } }, required: ['a'] } } },
    logit_bias: { 5: -3, 9: 1.5 },
  };
  const messages = [
    { role: 'user', content: 'How is the weather?' },
    { role: 'assistant', content: null, tool_calls: [{ id: 'c1', type: 'function', function: { name: 'weather', arguments: '{"city": "Paris"}' } }] },
    { role: 'tool', tool_call_id: 'c1', content: 'Sunny.' },
  ];
  const id = await generate({ ...fields, messages });
  const page = await open(`/runs/${id}`);
  await page.click('[data-again]');
  await page.waitForFunction(() => document.querySelectorAll('.message').length === 3);
  const sent = page.waitForRequest((request) => request.method() === 'POST' && request.url().endsWith('/v1/chat/completions'));
  await page.keyboard.press('Control+Enter');
  const body = (await sent).postDataJSON();
  for (const [name, value] of Object.entries({ ...fields, messages })) assert.deepEqual(body[name], value, name);
  await page.waitForFunction(() => /tokens/.test(document.querySelector('[data-state]').textContent), null, { timeout: 60000 });
  await page.context().close();
  await quiet();
});

test('a list left open while the server is away becomes true again by itself', async () => {
  // A server that comes and goes: what stands between the page and the real one.
  const { hostname, port } = new URL(URL_);
  const sockets = new Set();
  const serve = (at) => new Promise((resolve) => {
    const proxy = net.createServer((socket) => {
      const target = net.connect(Number(port), hostname);
      for (const end of [socket, target]) {
        sockets.add(end);
        end.on('error', () => {}).on('close', () => { sockets.delete(end); socket.destroy(); target.destroy(); });
      }
      socket.pipe(target).pipe(socket);
    }).listen(at, '127.0.0.1', () => resolve(proxy));
  });
  let proxy = await serve(0);
  const away = `http://127.0.0.1:${proxy.address().port}`;
  const stop = new AbortController();
  const user = `away-${Date.now()}`;
  const body = { prompt: user, max_tokens: 3500, ignore_eos: true, stream: true };
  const run = await fetch(`${URL_}/v1/completions`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body), signal: stop.signal });
  const id = run.headers.get('x-thunder-run-id');
  const page = await open(`/runs?q=${user}`, { server: away, expected: (what) => /ERR_|Failed to fetch/.test(what) });
  // It is on the list when it is stored.
  while (!await page.locator(`[data-run="${id}"]`).count()) {
    await page.waitForTimeout(100);
    await page.reload();
  }
  assert.equal(await page.textContent('.run-status'), 'running');
  await page.waitForSelector('.dot.on');
  const { port: at } = proxy.address();
  proxy.close();
  for (const socket of sockets) socket.destroy();
  await page.waitForSelector('.dot.off');
  stop.abort();
  await stored(id);
  const later = await stored((await post('/v1/completions', { prompt: user, max_tokens: 1 }).then((r) => r.json())).thunder.run_id);
  assert.equal(await page.textContent('.run-status'), 'running', 'nobody told the page');
  proxy = await serve(at);
  await page.waitForFunction(() => document.querySelector('.run-status').textContent !== 'running', null, { timeout: 30000 });
  assert.equal(await page.locator('.run').count(), 1, 'rows stay where they are');
  assert.match(await page.textContent('[data-news]'), /1 new run/);
  await page.click('[data-news]');
  await page.waitForSelector(`[data-run="${later}"]`);
  await page.context().close();
  proxy.close();
  for (const socket of sockets) socket.destroy();
  await quiet();
});
