// The stream of a live run.
import test from 'node:test';
import assert from 'node:assert/strict';
import { Deduplicator, followRun } from '../../src/ui/assets/replay/live.js';
import { SseParser } from '../../src/ui/assets/sse.js';
import { Fold } from '../../src/ui/assets/replay/fold.js';
import { Run } from '../../src/ui/assets/replay/run.js';

const event = (o) => ({ kind: 'event', ...o });

test('resumed stream may repeat items', () => {
  const once = new Deduplicator();
  assert.equal(once.isNew(event({ sequence_order: 0 })), true);
  assert.equal(once.isNew({ kind: 'mod_call', index: 0 }), true);
  assert.equal(once.isNew(event({ sequence_order: 0 })), false);
  assert.equal(once.isNew({ kind: 'mod_call', index: 0 }), false);
  assert.equal(once.isNew({ kind: 'mod_call', index: 1 }), true);
});

test('end-of-generation token is not counted as a token of the answer, unlike the end of a stop string', () => {
  for (const [end, length] of [[{ ends_generation: true }, 1], [{ stopped_by: 'b' }, 2]]) {
    const fold = new Fold();
    const run = new Run(fold);
    run.apply(event({ event_type: 'Prefilled', step: 0, sequence_order: 0, prompt_length: 0, details: { prompt: { tokens: [1], texts: ['Hi'] } } }));
    run.apply(event({ event_type: 'Added', step: 1, sequence_order: 1, added_tokens: [2], details: { tokens: [{ token: 2, text: 'a' }] } }));
    run.apply(event({ event_type: 'Added', step: 2, sequence_order: 2, added_tokens: [3], details: { tokens: [{ token: 3, text: 'b' }], ...end } }));
    assert.deepEqual([run.answerLength(3), run.answerLength(1), run.answer().length, fold.answerLength], [length, 1, 2, length]);
  }
});

for (const isClosed of [false, true]) {
  test(`${isClosed ? 'closed replay gets no' : 'replay gets the'} items that its stream has already received`, async (t) => {
    t.mock.timers.enable({ apis: ['setTimeout'] });
    const parse = t.mock.method(SseParser.prototype, 'push');
    const encoder = new TextEncoder();
    let body;
    const stream = new ReadableStream({ start: (controller) => { body = controller; } });
    t.mock.method(globalThis, 'fetch', async () => new Response(stream));
    let sent = 0;
    /** Sends an event, and waits until it is processed. */
    const send = async (event, data) => {
      body.enqueue(encoder.encode(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`));
      sent += 1;
      while (parse.mock.callCount() < sent) await new Promise(setImmediate);
    };
    const page = new AbortController();
    const received = [];
    const item = (index) => ({ kind: 'mod_call', index });
    followRun('a', { signal: page.signal, onState() {}, onItems: (items) => received.push(...items), onEnd: () => received.push('end') });
    await send('item', item(0));
    assert.deepEqual(received, [item(0)]);
    // These are delivered with a delay, which the replay does not wait for.
    await send('item', item(1));
    await send('item', item(2));
    assert.deepEqual(received, [item(0)]);
    if (isClosed) page.abort();
    t.mock.timers.tick(50);
    await send('end', {});
    assert.deepEqual(received, isClosed ? [item(0)] : [item(0), item(1), item(2), 'end']);
  });
}
