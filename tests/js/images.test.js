import test from 'node:test';
import assert from 'node:assert/strict';
import { imagesOf, patchValues, tokenCount } from '../../src/ui/assets/replay/images.js';

const tile = (start, columns, rows) => ({ start, columns, rows });
const image = (tiles, sha256 = 'a'.repeat(64)) => ({ sha256, tiles });

test('an image has the tokens of all its tiles', () => {
  assert.equal(tokenCount(image([tile(3, 4, 2), tile(20, 3, 3)])), 17);
});

test('attention is assigned to patches by their rows', () => {
  const rows = [0, 1, 2, 3, 4, 5, 6, 7, 8];
  const { tiles, mass, peak, peakPlace } = patchValues([tile(1, 2, 2), tile(6, 1, 2)], rows, [0.5, 0, 0.125, 0, 0.25, 0.0625, 0, 0.03125, 1]);
  assert.deepEqual(tiles.map((values) => [...values]), [[0, 0.125, 0, 0.25], [0, 0.03125]]);
  assert.equal(mass, 0.40625);
  assert.equal(peak, 0.25);
  assert.deepEqual(peakPlace, { tile: 0, column: 1, row: 1 });
});

test('evicted patches have no attention, and others keep theirs at their new positions', () => {
  // Rows 1 and 2 were evicted.
  const { tiles } = patchValues([tile(1, 2, 2)], [0, 3, 4, 5], [0.5, 0.25, 0.125, 0.125]);
  assert.deepEqual([...tiles[0]], [0, 0, 0.25, 0.125]);
});

test('without attention there is no highest patch', () => {
  assert.deepEqual(patchValues([tile(0, 1, 1)], [], []), { tiles: [new Float64Array(1)], mass: 0, peak: 0, peakPlace: null });
});

test('images of a foreign trace are ignored unless they are complete', () => {
  const good = image([tile(3, 8, 8)]);
  for (const bad of [null, {}, 5, { images: 'x' }, image([]), image([tile(-1, 8, 8)]), image([tile(1, 1e5, 1e5)]), image([null]), image([tile(1, 2, 2)], '<b>'), image([tile(1, 1.5, 2)])]) {
    assert.deepEqual(imagesOf({ images: [bad, good] }), [good]);
  }
  assert.deepEqual(imagesOf({}), []);
  assert.deepEqual(imagesOf({ images: 'x' }), []);
});
