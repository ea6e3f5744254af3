// Search in the handbook. Run: node --test tests/js
import test from 'node:test';
import assert from 'node:assert/strict';
import { excerpt, search, splitMatches, words } from '../../src/ui/assets/docs-search.js';

const entries = [
  { page: 'Ingest', slug: 'ingest', heading: 'The document', anchor: 'the-document', text: 'A run of another engine with its events.' },
  { page: 'Concepts', slug: 'concepts', heading: 'Run', anchor: 'run', text: 'A run is one generation.' },
  { page: 'Concepts', slug: 'concepts', heading: 'Event', anchor: 'event', text: 'A run is a list of events.' },
];

test('headings rank above text, and sections with all words above others', () => {
  assert.deepEqual(search(entries, 'run').map((entry) => entry.anchor), ['run', 'the-document', 'event']);
  assert.deepEqual(search(entries, 'engine EVENTS').map((entry) => entry.anchor), ['the-document', 'event']);
  assert.deepEqual(search(entries, 'nothing'), []);
  assert.deepEqual(search(entries, '  '), []);
  assert.equal(search(entries, 'run', 2).length, 2);
});

/** Returns the headings of the sections that match a query, best first. */
const found = (query) => search([
  ['Portable build', 'Needs no other files.'],
  ['Export', 'Exporting and importing runs, support for reports.'],
  ['Change a run with a mod', 'A mod changes the text. Import it first.'],
  ['--port PORT', 'Port of the listener', 'flags'],
  ['DryRunReport', 'A report: port, server, stop', 'reference'],
  ['IngestModLog', 'A log line of the ingest', 'reference'],
  ['Logs', 'The server writes a log. The format changes with a flag.'],
  ['Login page', 'A browser shows it. Change the key there.'],
  ['Start, health, stop', 'A signal ends the server.'],
  ['Writing mods', 'The first one.'],
].map(([heading, text, slug = 'guide']) => ({ heading, text, slug, page: 'Page', anchor: heading })), query).map(({ heading }) => heading);

test('whole words rank above beginnings of words, these above other parts, and types of the reference last', () => {
  assert.deepEqual(found('port'), ['--port PORT', 'Portable build', 'DryRunReport', 'Export', 'Change a run with a mod']);
  assert.equal(found('--port')[0], '--port PORT');
  assert.equal(found('change port')[0], '--port PORT');
  assert.equal(found('write a mod')[0], 'Writing mods');
});

test('stop words are left out, and two words find the one that they form', () => {
  assert.equal(found('stop the server')[0], 'Start, health, stop');
  assert.deepEqual(found('log in'), ['Login page', 'Logs', 'IngestModLog']);
  assert.deepEqual(words('The port of a server'), ['port', 'server']);
  assert.deepEqual(words('how to'), ['how', 'to']);
});

test('excerpt shows and marks the word', () => {
  const text = `${'before '.repeat(20)}the needle ${'after '.repeat(40)}`;
  const part = excerpt(text, words('needle'));
  assert.match(part, /^… .*needle/);
  assert.ok(part.length < 120);
  assert.match(excerpt(`support ${'x '.repeat(60)} the port is open`, ['port']), /the port is open$/);
  assert.deepEqual(splitMatches('Support, port', ['port']), [['Support, ', false], ['port', true]]);
  assert.deepEqual(splitMatches('a (b) c', words('(b)')), [['a ', false], ['(b)', true], [' c', false]]);
});
