// Details of traces of other engines, which have any form.
import test from 'node:test';
import assert from 'node:assert/strict';
import { explainCandidates } from '../../src/ui/assets/replay/candidates.js';
import { detailsOf, measurementsOf, movedOf, parametersOf } from '../../src/ui/assets/replay/details.js';
import { heights } from '../../src/ui/assets/replay/funnel.js';
import { Fold } from '../../src/ui/assets/replay/fold.js';

test('measurements of Thunder are returned unchanged', () => {
  const details = {
    position: 3, prompt: { tokens: [1, -7], texts: ['a', ''], spans: [{ role: 'user', start: 0, end: 2 }], images: [{ tiles: [{ start: 1 }] }], parameters: 'x' },
    tokens: [{ token: 5, text: 'b', logprob: -0.5, rank: null }], entropy: 1.5, model: [{ token: 5, text: 'b', prob: 1 }], lens: null, after_mods: [],
    stages: [{ name: 'top-k', left: 40 }], drafted: 5, redraws: 1, stopped_by: 'END', evicted: { ranges: [[0, 3]], messages: [{ role: 'user', tokens: 3, text: 'x' }] },
    note: null, ends_generation: false, discarded: 0, elapsed_us: 2 ** 40, other: { any: 1 },
  };
  assert.equal(measurementsOf({ details }), details);
});

test('details with a field of another type are ignored', () => {
  const details = [
    { stopped_by: 5 }, { stopped_by: { x: 1 } }, { stages: [null] }, { stages: ['a'] }, { stages: [{ name: 'top-k' }] }, { model: 'my-model' }, { model: [null] }, { tokens: [[5, 'x']] },
    { tokens: null }, { prompt: 'Once upon' }, { prompt: { texts: [5] } }, { prompt: { spans: 5 } }, { evicted: true }, { evicted: { ranges: [[1]] } },
    { entropy: 'high' }, { position: -1 }, { position: 1.5 }, { elapsed_us: 1e20 }, { ends_generation: 1 }, { lens: { layers: [-1] } }, [7], 'x', 5, null, undefined,
  ];
  for (const other of details) assert.deepEqual(measurementsOf({ details: other }), {}, JSON.stringify(other));
  assert.deepEqual(measurementsOf(undefined), {});
});

test('panel has candidates and stages of any details', () => {
  const top = [{ token: 7, prob: 0.4 }];
  for (const details of [{ model: 'my-model' }, { model: [] }, { model: {} }, { model: [null] }, {}, null]) {
    const { rows } = explainCandidates([{ event: { event_type: 'ForwardPass', top_tokens: top, details }, calls: [] }]);
    assert.deepEqual(rows.map(({ token }) => token), [7], JSON.stringify(details));
  }
  const model = [{ token: 7, prob: 0.4 }, { token: 8, prob: 0.3 }];
  for (const stages of [[null], ['a'], [{ left: 'x' }]]) {
    const explained = explainCandidates([
      { event: { event_type: 'ForwardPass', details: { model } }, calls: [] },
      { event: { event_type: 'Sampled', sampled_token: 7, details: { stages, after_sampler: [{ token: 7, prob: 1 }] } }, calls: [] },
    ]);
    assert.deepEqual(explained.stages, []);
    assert.ok(heights(explained.stages).every(Number.isFinite));
  }
});

test('details of actions with a field of another type are ignored', () => {
  const none = detailsOf({});
  for (const details of [{ superseded: 'yes' }, { texts: [5] }, { removed: { x: 1 } }, { tokens: ['a'] }, { backtrack_steps: 'many' }, [1], 'x', null]) {
    assert.deepEqual(detailsOf({ details }), none, JSON.stringify(details));
  }
  assert.equal(detailsOf({ details: { removed: 3, moved: [null] } }).removed, 3);
  const moved = [{ token: 2, text: 'a', before: 0.5, after: 0 }];
  assert.equal(movedOf({ details: { moved } }), moved);
  for (const other of [[null], [{ token: 2, text: 5 }], ['a'], 'x', {}]) assert.deepEqual(movedOf({ details: { moved: other } }), [], JSON.stringify(other));
});

test('parameters of a prompt may have any form', () => {
  const mods = [{ name: 'calm', version: 'abc', origin: 'builtin' }];
  const steering = [{ name: 'joy', scale: 1, layers: [1, 5] }];
  assert.deepEqual(parametersOf({ parameters: { mods, steering, n: 1 } }), { mods, steering });
  for (const parameters of [undefined, null, 'x', 5, [], { mods: 'calm', steering: 5 }, { mods: [null, 'calm'], steering: [null, { name: 'joy', layers: 5 }] }]) {
    assert.deepEqual(parametersOf({ parameters }), { mods: [], steering: [] }, JSON.stringify(parameters));
  }
});

test('prompt without tokens in details does not hide the length of the prompt', () => {
  const fold = new Fold();
  fold.apply({ kind: 'event', event_type: 'Prefilled', step: 0, sequence_order: 0, prompt_length: 150, details: { prompt: { text: 'Once' } } });
  assert.equal(fold.counters.prompt_tokens, 150);
});

test('names of Quote in details have no meaning next to specified fields', () => {
  const items = [
    { kind: 'event', event_type: 'Added', step: 1, sequence_order: 0, added_tokens: [5], added_token_count: 1 },
    { kind: 'mod_call', index: 0, event_sequence_order: 0, mod_name: 'm', event_type: 'Added', step: 1 },
    { kind: 'action', mod_call_sequence: 0, action_type: 'Backtrack', action_order: 0, backtrack_steps: 1, details: { backtrack_steps: 1 } },
  ];
  const backtracked = (options) => {
    const fold = new Fold(options);
    items.forEach((item) => fold.apply(item));
    return fold.counters.backtracked;
  };
  assert.deepEqual([backtracked(), backtracked({ hasSpecifiedActions: true })], [0, 1]);
});
