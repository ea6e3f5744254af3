import test from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { cellAfterKey } from '../../src/ui/assets/replay/grid.js';
import { bucketOfStatistic, describe } from '../../src/ui/assets/replay/heads.js';
import { viewQuery } from '../../src/ui/assets/replay/attention-requests.js';

const head = { layer: 3, head: 5, entropy: 2, sink_mass: 0.5, peak: 0.25, peak_position: 7 };

test('each statistic has its own scale', () => {
  // 16 positions: at most 4 bits; the peak is 8 of at most 15 positions back.
  assert.deepEqual(['entropy', 'sink_mass', 'peak', 'distance'].map((name) => bucketOfStatistic(name, head, 16)), [3, 3, 1, 5]);
  assert.deepEqual(['entropy', 'sink_mass', 'peak', 'distance'].map((name) => bucketOfStatistic(name, { ...head, entropy: 0, sink_mass: 1, peak: 1, peak_position: 0 }, 1)), [0, 7, 7, 0]);
});

test('a head is described by its numbers', () => {
  assert.equal(describe(head, 16), 'layer 3, head 5 · entropy 2.00 bit · sink mass 50.0% · peak 25.0% · distance to the peak 8 positions');
});

test('keys move within the grid', () => {
  assert.deepEqual(['ArrowUp', 'ArrowDown', 'ArrowLeft', 'ArrowRight'].map((key) => cellAfterKey(key, [1, 1], 3, 4)), [[0, 1], [2, 1], [1, 0], [1, 2]]);
  assert.deepEqual(['ArrowUp', 'ArrowLeft', 'Home', 'End', 'PageDown'].map((key) => cellAfterKey(key, [0, 0], 3, 4)), [[0, 0], [0, 0], [0, 0], [0, 3], [2, 0]]);
  assert.equal(cellAfterKey('a', [0, 0], 3, 4), null);
});

test('views name layer and head in the API', () => {
  assert.deepEqual(['mean', 'layer:3', 'head:3:0'].map(viewQuery), [{ view: 'mean' }, { view: 'layer', layer: '3' }, { view: 'head', layer: '3', head: '0' }]);
});

test('neighboring buckets of the shading can be told apart in both themes', () => {
  const css = readFileSync(new URL('../../src/ui/assets/base.css', import.meta.url), 'utf8');
  const pairs = Array.from({ length: 8 }, (_, b) => css.match(new RegExp(`--b${b}: light-dark\\((#\\w{6}), (#\\w{6})\\)`)).slice(1));
  for (const [theme, minDistance] of [[0, 0.03], [1, 0.038]]) {
    for (let b = 1; b < 8; b += 1) {
      const distance = Math.hypot(...oklab(pairs[b][theme]).map((x, i) => x - oklab(pairs[b - 1][theme])[i]));
      assert.ok(distance > minDistance, `${pairs[b - 1][theme]} and ${pairs[b][theme]}: ${distance}`);
    }
  }
});

/** Converts `#rrggbb` to OKLab, in which distances match perceived differences. */
function oklab(hex) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s, 1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s, 0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s];
}
