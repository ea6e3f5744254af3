// The candidates of a step.
import test from 'node:test';
import assert from 'node:assert/strict';
import { explainCandidates, percent } from '../../src/ui/assets/replay/candidates.js';

const event = (o) => ({ kind: 'event', ...o });

test('panel names the stage or mod that removed a candidate', () => {
  const entries = [
    {
      event: event({ event_type: 'ForwardPass', details: { model: [{ token: 1, text: 'a', prob: 0.5 }, { token: 2, text: 'b', prob: 0.3 }, { token: 3, text: 'c', prob: 0.1 }] } }),
      calls: [{ call: { mod_name: 'ban' }, logs: [], actions: [{ action_type: 'AdjustedLogits', details: { moved: [{ token: 2, after: 0 }] } }] }],
    },
    {
      event: event({ event_type: 'Sampled', sampled_token: 1, token_text: 'a', details: { after_mods: [{ token: 1, text: 'a', prob: 0.8 }, { token: 3, text: 'c', prob: 0.2 }], after_sampler: [{ token: 1, text: 'a', prob: 1 }], stages: [{ name: 'top-k', left: 2 }, { name: 'min-p', left: 1 }] } }),
      calls: [],
    },
  ];
  const { rows } = explainCandidates(entries);
  assert.deepEqual(rows.map((r) => [r.token, r.reason, r.chosen]), [[1, '', true], [2, 'masked by ban', false], [3, 'min-p', false]]);
  const foreign = explainCandidates([{ event: event({ event_type: 'ForwardPass', top_tokens: [{ token: 7, prob: 0.4 }, 'junk', null] }), calls: [] }]);
  assert.deepEqual(foreign.rows.map((r) => r.text), ['⟨7⟩']);
  assert.equal(explainCandidates([]).rows.length, 0);
  const named = explainCandidates([
    { event: event({ event_type: 'ForwardPass', top_tokens: [{ token: 7, prob: 0.4 }] }), calls: [] },
    { event: event({ event_type: 'Sampled', sampled_token: 7, token_text: ' there' }), calls: [] },
  ]);
  assert.equal(named.rows[0].text, ' there', 'the drawn token has its text even if the candidates have none');
  assert.equal(named.draft, null);
  const draftOf = (drafted) => explainCandidates([
    { event: event({ event_type: 'ForwardPass', details: { model: [{ token: 7, text: ' a', prob: 0.4 }, { token: 8, text: ' b', prob: 0.3 }] } }), calls: [] },
    { event: event({ event_type: 'Sampled', sampled_token: 7, details: { drafted } }), calls: [] },
  ]).draft;
  assert.deepEqual(draftOf(7), { isMatch: true, text: ' a' });
  assert.deepEqual(draftOf(8), { isMatch: false, text: ' b' });
  assert.deepEqual(draftOf(9), { isMatch: false, text: '⟨9⟩' });
  assert.equal(percent(0.5), '50.0%');
  assert.equal(percent(0.00001), '< 0.01%');
});
