// The parser of server-sent events.
import test from 'node:test';
import assert from 'node:assert/strict';
import { SseParser } from '../../src/ui/assets/sse.js';

test('events are complete for any split of the stream', () => {
  const text = ': hello\r\n\r\nevent: item\nid: 3\ndata: {"a":\ndata: 1}\n\ndata: x\r\r';
  for (let size = 1; size < text.length; size += 1) {
    const parser = new SseParser();
    const events = [];
    for (let i = 0; i < text.length; i += size) events.push(...parser.push(text.slice(i, i + size)));
    events.push(...parser.push('\n'));
    assert.deepEqual(events, [{ event: 'item', id: '3', data: '{"a":\n1}' }, { event: 'message', id: null, data: 'x' }], `cut by ${size}`);
  }
});
