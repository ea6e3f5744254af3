// Modules of the replay that need no browser. Run: node --test tests/js
import test from 'node:test';
import assert from 'node:assert/strict';
import { MODES, bucketOfShare, legend, surprise } from '../../src/ui/assets/replay/color.js';
import { sinkOf } from '../../src/ui/assets/replay/attention.js';
import { find, nextMatch } from '../../src/ui/assets/replay/find.js';
import { displayText, pieces } from '../../src/ui/assets/replay/glyphs.js';
import { Loader, group } from '../../src/ui/assets/replay/events.js';
import { Deduplicator } from '../../src/ui/assets/replay/live.js';
import { targetOf } from '../../src/ui/assets/replay/moves.js';
import { mayEndBlock, roles } from '../../src/ui/assets/replay/blocks.js';
import { isChipVisible, removals } from '../../src/ui/assets/replay/removals.js';
import { NEVER } from '../../src/ui/assets/replay/rows.js';
import { candidateTable, percent } from '../../src/ui/assets/replay/candidates.js';

test('characters that hide or reorder text are shown by name', () => {
  assert.deepEqual(pieces('a\u202eb'), [{ text: 'a' }, { name: 'U+202E' }, { text: 'b' }]);
  assert.deepEqual(pieces('\u0007'), [{ name: '\u2407' }]);
  assert.deepEqual(pieces('line\n\tend'), [{ text: 'line\n\tend' }]);
  assert.deepEqual(pieces('\u{e0041}'), [{ name: 'U+E0041' }]);
  assert.equal(pieces('👩\u200d🚀').length, 1, 'a joiner inside an emoji stays');
  assert.deepEqual(pieces('\u200d'), [{ name: 'U+200D' }]);
  assert.equal(displayText(' the\n'), '␣the↵');
  assert.equal(displayText(''), '∅');
});

test('removals are nested, and a folded removal hides its inner chips', () => {
  // Rows 1–5 are removed at event 50, but rows 2–3 were already removed at event 30.
  const removedAt = [NEVER, 50, 30, 30, 50, 50, NEVER];
  const all = removals(removedAt.length, (i) => removedAt[i]);
  assert.deepEqual(all.map((b) => [b.removedAt, b.first, b.last, b.count]), [[30, 2, 3, 2], [50, 1, 5, 3]]);
  const inner = all[0];
  assert.equal(inner.parent, all[1]);
  assert.equal(isChipVisible(inner, 29, () => false), false, 'not removed yet');
  assert.equal(isChipVisible(inner, 40, () => false), true);
  assert.equal(isChipVisible(inner, 60, () => false), false, 'inside a folded removal');
  assert.equal(isChipVisible(inner, 60, () => true), true);
});

test('find matches across tokens and skips hidden ones', () => {
  const texts = ['The', ' oc', 'ean', ' Ocean'];
  const text = (i) => texts[i];
  assert.deepEqual(find('ocean', 4, text, () => true), [[1, 1, 2], [3, 1, 3]]);
  assert.deepEqual(find('ocean', 4, text, (i) => i !== 2), [[3, 1, 3]]);
  assert.deepEqual(find('', 4, text, () => true), []);
});

test('position in a search is kept when the matches change', () => {
  assert.deepEqual([-1, 3, 7].map((row) => nextMatch([[3, 0, 3], [7, 0, 8]], [row, 0], 1)), [0, 1, 0]);
  assert.deepEqual([7, 3].map((row) => nextMatch([[3, 0, 3], [7, 0, 8]], [row, 0], -1)), [0, 1]);
  assert.deepEqual([1, -1].map((step) => nextMatch([[1, 0, 1], [3, 0, 3], [5, 0, 5], [7, 0, 8]], [3, 0], step)), [2, 0]);
  assert.deepEqual([1, -1].map((step) => nextMatch([], [3, 0], step)), [-1, -1]);
});

test('all matches that begin in one token are reached', () => {
  const texts = ['A', ' banana'];
  const matches = find('a', 2, (i) => texts[i], () => true);
  assert.deepEqual(matches, [[0, 0, 0], [1, 2, 1], [1, 4, 1], [1, 6, 1]]);
  const reached = (step) => {
    let match = [-1, 0];
    return matches.map(() => {
      const index = nextMatch(matches, match, step);
      match = matches[index];
      return index;
    });
  };
  assert.deepEqual([reached(1), reached(-1)], [[0, 1, 2, 3], [3, 2, 1, 0]]);
});

test('loader loads the newest target after each load, and none after it is cancelled', async () => {
  const loads = [];
  const loader = new Loader((target) => new Promise((finish) => { loads.push({ target, finish }); }));
  const started = async (count) => { while (loads.length < count) await new Promise((resolve) => setTimeout(resolve, 5)); };
  loader.request('a');
  await started(1);
  for (const target of ['b', 'c', 'd']) loader.request(target);
  loads[0].finish();
  await started(2);
  loader.request('e');
  loader.cancel();
  loads[1].finish();
  await new Promise((resolve) => setTimeout(resolve, 100));
  loader.request('f');
  await started(3);
  assert.deepEqual(loads.map(({ target }) => target), ['a', 'd', 'f']);
  loads[2].finish();
  await new Promise((resolve) => setTimeout(resolve));
  assert.equal(loader.target, null);
});

test('template text is attributed to its message', () => {
  const texts = ['<s>', 'user', '\n', 'Hi', '<e>', '\n', '<s>', 'assistant', '\n'];
  const spans = [{ role: 'template', start: 0, end: 3 }, { role: 'user', start: 3, end: 4 }, { role: 'template', start: 4, end: 9 }];
  assert.deepEqual(roles(9, spans, texts).map((r) => r.role), ['user', 'user', 'user', 'user', 'user', 'user', 'answer', 'answer', 'answer']);
  assert.equal(roles(9, spans, texts)[3].dim, false);
  assert.equal(roles(2, undefined, []).length, 2);
});

test('a block ends after a line, a sentence or the maximum of rows', () => {
  assert.equal(mayEndBlock(100, '\n'), false);
  assert.equal(mayEndBlock(128, 'x\n'), true);
  assert.equal(mayEndBlock(512, ' x'), false);
  assert.equal(mayEndBlock(512, ' x.”'), true);
  assert.equal(mayEndBlock(1024, ' x'), true);
});

const run = {
  eventCount: 7,
  count: 3,
  type: (e) => ['Prefilled', 'ForwardPass', 'Sampled', 'Added', 'ForwardPass', 'Sampled', 'Added'][e],
  addedAt: (i) => [0, 3, 6][i],
  removedAt: (i) => [NEVER, 5, NEVER][i],
  isPrompt: (i) => i === 0,
  marks: [{ seq: 4, kind: 'action' }, { seq: 2, kind: 'error' }],
  logprob: (i) => [null, -Math.LN2 * 5, -0.01][i],
};

test('keys move to tokens, marks, backtracks and surprising tokens', () => {
  const go = (action, n) => targetOf(action, run, n, (i) => surprise(run, i), 4);
  assert.equal(go('nextToken', 0), 3);
  assert.equal(go('nextToken', 6), 7, 'the end follows the last token');
  assert.equal(go('prevToken', 7), 6);
  assert.equal(go('prevToken', 3), 0);
  assert.equal(go('nextEvent', 7), 7);
  assert.equal(go('nextAction', 0), 4);
  assert.equal(go('nextAction', 4), 'No mod action after this.');
  assert.equal(go('prevError', 2), 'No error before this.');
  assert.equal(go('prevError', 7), 2);
  assert.equal(go('nextBacktrack', 0), 4);
  assert.equal(go('nextSurprise', 0), 3);
  assert.equal(go('nextSurprise', 3), 'No surprising token after this.');
  assert.equal(targetOf('nextBacktrack', { ...run, removedAt: () => NEVER }, 0, () => 0, 4), 'No backtrack in this run.');
  assert.equal(go('color', 3), undefined);
});

test('legend has the same buckets as the text', () => {
  for (const mode of MODES.filter((m) => m.edges.length)) {
    assert.deepEqual(legend(mode).map((l) => l.bucket), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert.equal(mode.edges.length, 7);
  }
  assert.equal(MODES[0].bucket(run, 1), 5, 'five bits');
  assert.equal(MODES[0].bucket(run, 0), -1, 'not measured');
});

test('attention sink is detected by its mass and excluded from the scale', () => {
  assert.deepEqual(sinkOf([0.1, 0.7, 0.1, 0.1]), { sink: 1, peak: 0.1 });
  assert.deepEqual(sinkOf([0.3, 0.3, 0.4]), { sink: -1, peak: 0.4 });
  assert.deepEqual(sinkOf([]), { sink: -1, peak: 0 });
  assert.equal(bucketOfShare(0, 0.5), 0);
  assert.equal(bucketOfShare(0.5, 0.5), 7);
  assert.equal(bucketOfShare(1, 0.5), 7);
});

const event = (o) => ({ kind: 'event', ...o });

test('items are grouped by event', () => {
  const map = group([
    event({ sequence_order: 4, event_type: 'Added' }),
    { kind: 'mod_call', index: 9, event_sequence_order: 4, mod_name: 'm' },
    { kind: 'mod_log', index: 0, mod_call_sequence: 9, log_message: 'x' },
    { kind: 'action', index: 0, mod_call_sequence: 9, action_type: 'Noop' },
    event({ sequence_order: 5, event_type: 'ForwardPass' }),
    { kind: 'action', index: 1, mod_call_sequence: 77, action_type: 'Noop' },
  ]);
  assert.equal(map.get(4).calls[0].logs.length, 1);
  assert.equal(map.get(4).calls[0].actions.length, 1);
  assert.equal(map.get(5).calls.length, 0);
});

test('resumed stream may repeat items', () => {
  const once = new Deduplicator();
  assert.equal(once.isNew(event({ sequence_order: 0 })), true);
  assert.equal(once.isNew({ kind: 'mod_call', index: 0 }), true);
  assert.equal(once.isNew(event({ sequence_order: 0 })), false);
  assert.equal(once.isNew({ kind: 'mod_call', index: 0 }), false);
  assert.equal(once.isNew({ kind: 'mod_call', index: 1 }), true);
});

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
  const { rows } = candidateTable(entries);
  assert.deepEqual(rows.map((r) => [r.token, r.reason, r.chosen]), [[1, '', true], [2, 'masked by ban', false], [3, 'min-p', false]]);
  const foreign = candidateTable([{ event: event({ event_type: 'ForwardPass', top_tokens: [{ token: 7, prob: 0.4 }, 'junk', null] }), calls: [] }]);
  assert.deepEqual(foreign.rows.map((r) => r.text), ['⟨7⟩']);
  assert.equal(candidateTable([]).rows.length, 0);
  const named = candidateTable([
    { event: event({ event_type: 'ForwardPass', top_tokens: [{ token: 7, prob: 0.4 }] }), calls: [] },
    { event: event({ event_type: 'Sampled', sampled_token: 7, token_text: ' there' }), calls: [] },
  ]);
  assert.equal(named.rows[0].text, ' there', 'the drawn token has its text even if the candidates have none');
  assert.equal(named.draft, null);
  const draftOf = (drafted) => candidateTable([
    { event: event({ event_type: 'ForwardPass', details: { model: [{ token: 7, text: ' a', prob: 0.4 }, { token: 8, text: ' b', prob: 0.3 }] } }), calls: [] },
    { event: event({ event_type: 'Sampled', sampled_token: 7, details: { drafted } }), calls: [] },
  ]).draft;
  assert.deepEqual(draftOf(7), { isMatch: true, text: ' a' });
  assert.deepEqual(draftOf(8), { isMatch: false, text: ' b' });
  assert.deepEqual(draftOf(9), { isMatch: false, text: '⟨9⟩' });
  assert.equal(percent(0.5), '50.0%');
  assert.equal(percent(0.00001), '< 0.01%');
});
