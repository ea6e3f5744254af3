// The fold of a live run, and the columns of a stored one. Run: node --test tests/js
import test from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync, readdirSync } from 'node:fs';
import { Fold } from '../../src/ui/assets/replay/fold.js';
import { NEVER } from '../../src/ui/assets/replay/run-columns.js';
import { parseColumns } from '../../src/ui/assets/replay/columns.js';

const folder = new URL('../../fixtures/folds/', import.meta.url);
const fixtures = readdirSync(folder).filter((name) => name.endsWith('.json'));
const read = (name) => JSON.parse(readFileSync(new URL(name, folder), 'utf8'));

/** Returns the visible rows after event `n`, by position. */
function visibleAt({ count, addedAt, removedAt, pos }, n) {
  const rows = Array.from({ length: count }, (_, i) => i).filter((i) => addedAt[i] <= n && n < removedAt[i]);
  return rows.sort((a, b) => pos[a] - pos[b]);
}

/** Returns the state in the form of the fixtures' `expected`. */
function expectation(state) {
  const { count, eventCount } = state;
  const range = (n) => Array.from({ length: n }, (_, i) => i);
  return {
    unknown_q: 65535,
    events: range(eventCount).map((e) => [state.kinds[e], state.steps[e], state.times[e]]),
    rows: range(count).map((i) => ({
      token: state.token[i],
      text: state.text(i),
      pos: state.pos[i],
      added_at: state.addedAt[i],
      removed_at: state.removedAt[i] === NEVER ? null : state.removedAt[i],
      logprob_q: state.logprobs[i],
      rank: state.rank[i],
      entropy_q: state.entropies[i],
      flags: state.flags[i],
      dt_us: state.dt[i],
    })),
    marks: state.marks,
    visible: range(eventCount + 1).map((n) => visibleAt(state, n)),
    counters: state.counters,
    answer: state.answer,
  };
}

/** Fields of a state that the columns do not contain. */
const notStored = { counters: null, answer: null };

for (const name of fixtures) {
  test(`fixture ${name}`, () => {
    const { items, expected, columns } = read(name);
    const state = new Fold();
    items.forEach((item) => state.apply(item));
    assert.deepEqual(expectation(state), expected);

    const bytes = Buffer.from(columns, 'base64');
    const stored = parseColumns(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
    assert.deepEqual({ ...expectation(stored), ...notStored }, { ...expected, ...notStored }, 'read from columns');
  });
}

test('times of stored columns of version 1 are milliseconds', () => {
  const bytes = Buffer.from(read('specification.json').columns, 'base64');
  const view = new DataView(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
  const count = view.getUint32(8, true);
  const entry = Array.from({ length: view.getUint32(16, true) }, (_, i) => 20 + 12 * i).find((at) => view.getUint32(at, true) === 10);
  view.setUint16(4, 1, true);
  view.setUint32(entry + 8, 2 * count, true);
  view.setUint16(view.getUint32(entry + 4, true), 7, true);
  assert.equal(parseColumns(view.buffer).dt[0], 7000);
});

/** Returns the items of a document in order: each event, then its calls, each with its actions. */
function itemsOf({ events, mod_calls: calls, actions }) {
  return events.flatMap((event) => [
    { kind: 'event', ...event },
    ...calls.flatMap((call, index) => (call.event_sequence_order === event.sequence_order ? [
      { kind: 'mod_call', index, ...call },
      ...actions.filter((action) => action.mod_call_sequence === index).map((action) => ({ kind: 'action', ...action })),
    ] : [])),
  ]);
}

test('traces of Quote fold to their final text', () => {
  const documents = JSON.parse(readFileSync(new URL('../quote_traces.json', folder), 'utf8'));
  for (const document of documents) {
    const state = new Fold();
    itemsOf(document).forEach((item) => state.apply(item));
    assert.equal(state.answer, document.request.final_text, document.request.request_id);
  }
});

test('columns of 200 000 tokens grow in place', () => {
  const state = new Fold();
  let copies = 0;
  let held = state.token;
  for (let seq = 0; seq < 200_000; seq += 1) {
    state.apply({ kind: 'event', event_type: 'Added', step: seq, sequence_order: seq, added_tokens: [seq % 100] });
    if (state.token !== held) copies += 1;
    held = state.token;
  }
  assert.equal(state.count, 200_000);
  assert.ok(copies < 32, `${copies} copies`);
});

test('damaged columns throw an error with a message', () => {
  const { columns } = read('foreign.json');
  const whole = Buffer.from(columns, 'base64');
  for (let cut = 0; cut < whole.length; cut += 7) {
    const bytes = new Uint8Array(whole.subarray(0, cut)).buffer;
    assert.throws(() => parseColumns(bytes), Error);
  }
  for (let i = 0; i < whole.length; i += 1) {
    const bytes = new Uint8Array(whole);
    bytes[i] ^= 0x55;
    try {
      parseColumns(bytes.buffer);
    } catch (error) {
      assert.ok(error instanceof Error);
    }
  }
});
