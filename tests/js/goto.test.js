// The command field.
import test from 'node:test';
import assert from 'node:assert/strict';
import { destination } from '../../src/ui/assets/goto.js';

test('command field finds events, tokens, runs, pages and searches', () => {
  const id = '0192f0c4-0000-7000-8000-000000000001';
  assert.deepEqual(destination('event 1207', true), { event: 1207 });
  assert.deepEqual(destination(' 12 ', true), { event: 12 });
  assert.deepEqual(destination('token 400', true), { token: 400 });
  assert.equal(destination('12', false).href, '/runs?q=12');
  assert.equal(destination(id, true).href, `/runs/${id}`);
  assert.equal(destination('Mods', false).href, '/mods');
  assert.equal(destination('statistics', false).href, '/stats');
  assert.equal(destination('api', false).href, '/docs/reference');
  assert.equal(destination('constructor', false).label, 'search runs');
  assert.equal(destination('model:demo "a b"', true).href, '/runs?q=model%3Ademo+%22a+b%22');
  assert.equal(destination('  ', true), null);
});
