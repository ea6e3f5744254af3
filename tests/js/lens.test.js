import test from 'node:test';
import assert from 'node:assert/strict';
import { lensOf, summary } from '../../src/ui/assets/replay/lens.js';

const model = [{ token: 7, text: ' the', prob: 0.6 }, { token: 8, text: ' a', prob: 0.3 }, { token: 9, text: ' my', prob: 0.1 }];
const lens = { layers: [0, 1, 2], logits: [[0, 2, 1], [3, 3, -1], [Math.log(6), Math.log(3), 0]] };
const event = (details) => ({ event_type: 'ForwardPass', details: { model, ...details } });

test('logits of a layer become shares and ranks', () => {
  const { layers, cells } = lensOf(event({ lens }));
  assert.deepEqual(layers, [0, 1, 2]);
  assert.deepEqual([7, 8, 9].map((token) => cells.get(token).map(({ rank }) => rank)), [[3, 1, 1], [1, 1, 2], [2, 3, 3]]);
  const shares = [7, 8, 9].map((token) => cells.get(token)[2].share);
  shares.forEach((share, i) => assert.ok(Math.abs(share - model[i].prob) < 1e-12, `${shares}`));
  assert.equal(cells.get(9)[1].logit, -1);
});

test('shares of huge logits are finite', () => {
  const { cells } = lensOf(event({ lens: { layers: [0], logits: [[1e308, -1e308, 1e308]] } }));
  assert.deepEqual([7, 8, 9].map((token) => cells.get(token)[0].share), [0.5, 0, 0.5]);
});

test('lens may have the first candidates only', () => {
  const { cells } = lensOf(event({ lens: { layers: [0, 1], logits: [[0, 2], [3, 2]] } }));
  assert.deepEqual([...cells].map(([token, [, { rank }]]) => [token, rank]), [[7, 1], [8, 2]]);
});

test('lens of a trace with top_tokens refers to these', () => {
  const { cells } = lensOf({ event_type: 'ForwardPass', top_tokens: model, details: { lens } });
  assert.deepEqual([...cells.keys()], [7, 8, 9]);
});

test('lens with an invalid form is not shown', () => {
  const { layers, logits } = lens;
  const long = Array.from({ length: 1000 }, (_, i) => i);
  const invalid = [
    null, 'x', 5, [], {}, { layers }, { logits }, { layers: [], logits: [] }, { layers: 3, logits }, { layers: [0, 1], logits },
    { layers: [0, 1, 2.5], logits }, { layers: [0, 1, '2'], logits }, { layers, logits: 'abc' }, { layers, logits: [1, 2, 3] },
    { layers, logits: logits.map((row) => [...row, 1]) }, { layers, logits: [...logits.slice(1), [1, 2]] }, { layers, logits: [...logits.slice(1), null] },
    { layers, logits: [...logits.slice(1), [1, 2, null]] }, { layers, logits: [...logits.slice(1), [1, 2, JSON.parse('1e999')]] },
    { layers: long, logits: long.map(() => [1, 2, 3]) },
  ];
  for (const other of invalid) assert.equal(lensOf(event({ lens: other })), null, JSON.stringify(other)?.slice(0, 80));
  for (const other of [undefined, [], 'abc', [1, null, 3], {}]) assert.equal(lensOf(event({ model: other, lens })), null, JSON.stringify(other));
  for (const none of [undefined, null, {}, { details: null }, { details: 'x' }, event({})]) assert.equal(lensOf(none), null);
});

test('summary names the layers in which the drawn token is the highest candidate', () => {
  const sentence = (ranks) => summary(ranks.map((_, i) => i + 4), ranks.map((rank) => ({ rank })));
  assert.equal(sentence([2, 1, 3, 1, 1]), 'is the highest candidate from layer 7 on.');
  assert.equal(sentence([2, 1, 3, 1]), 'is the highest candidate from layer 7 on.');
  assert.equal(sentence([1, 1]), 'is the highest candidate in all layers.');
  assert.equal(sentence([3, 2, 1]), 'is not the highest candidate before the last layer.');
  assert.equal(sentence([1, 3, 1, 2]), 'has rank 2 in the last layer, and is the highest candidate in 2 of the layers before it.');
  assert.equal(sentence([5, 4]), 'has rank 4 in the last layer, and is the highest candidate in none of the layers before it.');
  assert.equal(summary([0], undefined), 'is not among the candidates of the model.');
});
