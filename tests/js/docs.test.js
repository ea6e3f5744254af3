// Search in the handbook. Run: node --test tests/js
import test from 'node:test';
import assert from 'node:assert/strict';
import { excerpt, search, splitMatches, words } from '../../src/ui/assets/docs-search.js';

const entries = [
  { page: 'Ingest', slug: 'ingest', heading: 'The document', anchor: 'the-document', text: 'A run of another engine with its events.' },
  { page: 'Concepts', slug: 'concepts', heading: 'Run', anchor: 'run', text: 'A run is one generation.' },
  { page: 'Concepts', slug: 'concepts', heading: 'Event', anchor: 'event', text: 'A run is a list of events.' },
];

test('headings rank above text, and all words must match', () => {
  assert.deepEqual(search(entries, 'run').map((entry) => entry.anchor), ['run', 'the-document', 'event']);
  assert.deepEqual(search(entries, 'engine EVENTS').map((entry) => entry.anchor), ['the-document']);
  assert.deepEqual(search(entries, 'nothing'), []);
  assert.deepEqual(search(entries, '  '), []);
  assert.equal(search(entries, 'run', 2).length, 2);
});

test('excerpt shows and marks the word', () => {
  const text = `${'before '.repeat(20)}the needle ${'after '.repeat(40)}`;
  const part = excerpt(text, words('needle'));
  assert.match(part, /^… .*needle/);
  assert.ok(part.length < 120);
  assert.deepEqual(splitMatches('a (b) c', words('(b)')), [['a ', false], ['(b)', true], [' c', false]]);
});
