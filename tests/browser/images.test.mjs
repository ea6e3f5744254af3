// Images of a prompt in the replay. IMAGES_URL is a server with the demo model, a projector, --attention on and --record-images.
import test from 'node:test';
import assert from 'node:assert/strict';
import { open, newContext, eventually, expectAccessible, ready } from './browser.mjs';
import { json, generate } from './server.mjs';

const server = process.env.IMAGES_URL;
const skip = server ? false : 'set IMAGES_URL to a server with a projector';
const PNG = 'iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAIAAAAiZtkUAAAAGElEQVR4nGNkYGjQYGBARiwMNgxogDghAHPAAgoN/kQJAAAAAElFTkSuQmCC';

/** Generates a run whose prompt has an image. */
function generateWithImage(fields) {
  const content = [{ type: 'text', text: 'What is this?' }, { type: 'image_url', image_url: { url: `data:image/png;base64,${PNG}` } }];
  return generate({ messages: [{ role: 'user', content }], max_tokens: 8, ignore_eos: true, ...fields }, { server });
}

const attention = async (id, at) => (await json(`/api/v1/runs/${id}/attention?at=${at}`, { server })).attention;

for (const width of [1280, 375]) {
  test(`image is a chip that unfolds, with the attention over its patches (${width} px)`, { skip }, async () => {
    const id = await generateWithImage({ attention: true });
    const page = await open(`/runs/${id}?attention=mean`, { width, server });
    await ready(page);
    const chip = page.locator('.text .image-chip');
    await chip.waitFor();
    await eventually.match(() => chip.locator('summary').textContent(), /^▣ Image · 6 × 4 · 64 tokens · [0-9a-f]{8}$/);
    await eventually.equal(() => page.locator('.text .token:visible', { hasText: '<image>' }).count(), 0);
    await eventually.equal(() => chip.locator('img').isVisible(), false);
    // By keyboard, and without an effect on the replay.
    const where = await page.textContent('[data-where]');
    await chip.locator('summary').focus();
    await page.keyboard.press('Enter');
    await chip.locator('img').waitFor();
    await page.waitForFunction(() => document.querySelector('.text .image-chip img').naturalWidth === 6);
    await eventually.equal(() => page.textContent('[data-where]'), where);
    await page.keyboard.press('Space');
    await eventually.equal(() => chip.locator('img').isVisible(), false);
    await page.keyboard.press('Enter');
    const facts = page.locator('.patches .hint');
    await facts.waitFor();
    // The attention of the last step.
    const { run, events } = await json(`/api/v1/runs/${id}`, { server });
    const { start, columns, rows } = events[0].details.prompt.images[0].tiles[0];
    assert.deepEqual([columns, rows], [8, 8]);
    const last = events.filter((event) => event.event_type === 'ForwardPass').at(-1).sequence_order;
    const { values } = await attention(run.run_id, last);
    const mass = values.slice(start, start + 64).reduce((a, b) => a + b, 0);
    await page.waitForFunction((percent) => Math.abs(parseFloat(document.querySelector('.patches .hint').textContent) - percent) < 0.06, mass * 100);
    await eventually.match(() => facts.textContent(), /of the attention · highest patch .* at column \d, row \d$/);
    await eventually.match(() => page.locator('.patches canvas').getAttribute('aria-label'), /^Attention over 8 × 8 patches: /);
    const box = await page.locator('.patch-grid').boundingBox();
    assert.ok(Math.abs(box.width / box.height - 1.5) < 0.05, `the grid has the shape of the image: ${box.width} × ${box.height}`);
    const colors = await page.evaluate(() => {
      const canvas = document.querySelector('.patches canvas');
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      return new Set(Array.from({ length: 64 }, (_, k) => data[4 * (canvas.width * Math.floor((Math.floor(k / 8) + 0.5) * canvas.height / 8) + Math.floor((k % 8 + 0.5) * canvas.width / 8)) + 3])).size;
    });
    assert.ok(colors > 4, `${colors} different shades`);
    await expectAccessible(page, '.text, .panel');
    // Without attention the section is hidden.
    await page.click('[data-action=attention]');
    await facts.waitFor({ state: 'hidden' });
  });
}

test('exported page shows the chip without the file', { skip }, async () => {
  const id = await generateWithImage({});
  const html = await (await fetch(`${server}/runs/${id}/export.html`)).text();
  const page = await (await newContext()).newPage();
  const problems = [];
  page.on('console', (message) => problems.push(message.text()));
  page.on('pageerror', (error) => problems.push(error.stack));
  await page.setContent(html);
  await ready(page);
  await page.locator('.text .image-chip summary').click();
  await eventually.match(() => page.textContent('.text .image-chip'), /6 × 4 · 64 tokens.*not recorded/s);
  await eventually.equal(() => page.locator('.text img').count(), 0);
  assert.deepEqual(problems, []);
});
