// Loading and grouping of events.
import test from 'node:test';
import assert from 'node:assert/strict';
import { Loader, group } from '../../src/ui/assets/replay/events.js';

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
