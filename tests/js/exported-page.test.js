import test from 'node:test';
import assert from 'node:assert/strict';
import { gzipSync } from 'node:zlib';
import { unpack } from '../../src/ui/assets/replay/exported-page.js';

test('items of an exported page are unpacked unchanged', async () => {
  const items = [{ kind: 'event', text: '</script>\u202e\u2028' }, { kind: 'mod_call', index: 0 }];
  const packed = gzipSync(`${items.map((item) => JSON.stringify(item)).join('\n')}\n`).toString('base64');
  assert.deepEqual(await unpack(packed), items);
});
