import test from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { asNewRun } from '../../src/ui/assets/sample.js';

test('times of the sample run are moved to the present', () => {
  const text = JSON.stringify({
    request: { request_id: 'a', created_at: '2026-01-02T03:04:05Z', completed_at: '2026-01-02T03:04:06.5Z', model: 'demo' },
    events: [{ created_at: '2026-01-02T03:04:05.25Z', details: null }], actions: [{ created_at: null }],
  });
  const document = asNewRun(text, 'b', Date.parse('2030-01-01T00:00:00Z'));
  assert.deepEqual(document.request, { request_id: 'b', created_at: '2030-01-01T00:00:00.000Z', completed_at: '2030-01-01T00:00:01.500Z', model: 'demo' });
  assert.equal(document.events[0].created_at, '2030-01-01T00:00:00.250Z');
  assert.equal(document.actions[0].created_at, null);
});

test('bundled sample run is small, and a mod changes it', () => {
  const text = readFileSync(new URL('../../src/ui/assets/sample-run.json', import.meta.url), 'utf8');
  assert.ok(text.length <= 60_000, `${text.length} bytes`);
  const types = JSON.parse(text).actions.map((action) => action.action_type);
  assert.ok(types.some((type) => ['Backtrack', 'ForceTokens'].includes(type)), types.join());
});
