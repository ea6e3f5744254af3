// The model's context during a run, whose positions are those of attention. Run: node --test tests/js
import test from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { Fold } from '../../src/ui/assets/replay/fold.js';
import { NEVER } from '../../src/ui/assets/replay/run-columns.js';
import { Run } from '../../src/ui/assets/replay/run.js';

// Rows 0 to 3 are the prompt, 4 to 8 the tokens " a0" to " a4", and 9 and 10 forced tokens.
const { items, columns } = JSON.parse(readFileSync(new URL('../../fixtures/folds/context_shift.json', import.meta.url), 'utf8'));
const CONTEXTS = [
  [0, 1, 2, 3],
  [0, 1, 2, 3, 4],
  [0, 1, 2, 3, 4, 5],
  [0, 1, 2, 3, 4, 5, 6],
  [0, 1, 2, 3, 4, 5, 6, 7],
  [0, 1, 2, 3, 6, 7],
  [0, 1, 2, 3, 6, 7, 8],
  [0, 2, 6, 9, 10],
  [0, 2, 6, 9, 10],
  [0, 2, 6, 9, 10],
];

/** Checks the contexts of a run from its last event to its first one, and its evictions. */
function check(run) {
  for (let n = run.eventCount; n >= 0; n -= 1) assert.deepEqual(run.context(n), CONTEXTS[n], `event ${n}`);
  assert.equal(run.text(run.context(5)[4]), ' a2');
  assert.deepEqual([0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map((row) => run.leftContextAt(row)), [NEVER, 7, NEVER, 7, 5, 5, NEVER, 7, 7, NEVER]);
  assert.deepEqual([0, 4, 5, 6, 7, 9].map((n) => run.nextEviction(n)), [5, 5, 7, 7, NEVER, NEVER]);
}

test('evicted tokens leave the context of a stored run but not its text', () => {
  const bytes = Buffer.from(columns, 'base64');
  const run = Run.stored(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
  check(run);
  assert.deepEqual(run.sequence(8), [0, 1, 2, 3, 4, 5, 6, 9, 10]);
});

test('the context of a live run follows its events', () => {
  const run = new Run(new Fold());
  for (const item of items) {
    run.apply(item);
    if (item.kind === 'event') assert.deepEqual(run.context(item.sequence_order), CONTEXTS[item.sequence_order]);
  }
  check(run);
});

test('evictions are read without the context of the whole run for each', () => {
  const size = 8;
  const count = 1000;
  const addedAt = Array.from({ length: count }, (_, i) => Math.max(0, i - size + 1));
  let reads = 0;
  const removedAt = new Proxy([], { get: () => { reads += 1; return NEVER; } });
  // Each row after the first ones evicts the second one of the context.
  const marks = addedAt.slice(size).map((seq) => ({ seq, evicted: [[1, 2]] }));
  const run = new Run({ count, eventCount: count, addedAt, removedAt, marks, pos: addedAt.map((_, i) => i) });
  assert.equal(run.leftContextAt(1), 1);
  assert.equal(run.leftContextAt(500), 500);
  assert.ok(reads < 10 * count, `${reads} reads`);
  assert.deepEqual(run.context(count), [0, ...Array.from({ length: size - 1 }, (_, i) => count - size + 1 + i)]);
});

test('a context begins after a prompt whose tokens are unknown', () => {
  const run = new Run(new Fold());
  run.apply({ kind: 'event', event_type: 'Prefilled', step: 0, sequence_order: 0, prompt_length: 2 });
  run.apply({ kind: 'event', event_type: 'Added', step: 1, sequence_order: 1, added_tokens: [5, 6] });
  assert.deepEqual(run.context(1), [, , 0, 1]);
});
