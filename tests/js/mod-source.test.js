// The upload of a saved mod.
import test from 'node:test';
import assert from 'node:assert/strict';
import { uploadOf } from '../../src/ui/assets/mod-source.js';

test('saved mod keeps the fields of its previous version except the source', () => {
  const kept = { name: 'calm', language: 'python', module: null, entrypoint: 'f', description: 'Calm.', source: null };
  assert.deepEqual(uploadOf(kept, 'calm', 'x = 1'), { name: 'calm', language: 'python', entrypoint: 'f', description: 'Calm.', source: 'x = 1' });
  assert.deepEqual(uploadOf({}, 'new', ''), { name: 'new', language: 'python', source: '' });
});
