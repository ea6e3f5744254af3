// The stream of a live run.
import test from 'node:test';
import assert from 'node:assert/strict';
import { Deduplicator, followRun } from '../../src/ui/assets/replay/live.js';
import { SseParser } from '../../src/ui/assets/sse.js';

const event = (o) => ({ kind: 'event', ...o });

test('resumed stream may repeat items', () => {
  const once = new Deduplicator();
  assert.equal(once.isNew(event({ sequence_order: 0 })), true);
  assert.equal(once.isNew({ kind: 'mod_call', index: 0 }), true);
  assert.equal(once.isNew(event({ sequence_order: 0 })), false);
  assert.equal(once.isNew({ kind: 'mod_call', index: 0 }), false);
  assert.equal(once.isNew({ kind: 'mod_call', index: 1 }), true);
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
