import test from 'node:test';
import assert from 'node:assert/strict';
import { documentsIn, importProblem, resultText } from '../../src/ui/assets/import.js';

test('only documents of a run are sent', () => {
  assert.equal(importProblem('{"request": {}, "events": []}'), '');
  assert.match(importProblem('[1]'), /"request" is missing/);
  assert.match(importProblem('<!doctype html>'), /it is an HTML file/);
  assert.match(importProblem('{'), /not JSON/);
});

test('file of JSON lines has one document per line', () => {
  assert.deepEqual(documentsIn('runs.jsonl', '{"a": 1}\n\n{"b": 2}\n'), [{ text: '{"a": 1}', line: 1 }, { text: '{"b": 2}', line: 3 }]);
  assert.deepEqual(documentsIn('run.json', '{\n}\n'), [{ text: '{\n}\n', line: 1 }]);
  assert.deepEqual(documentsIn('run.json', ' \n'), []);
});

test('result of a file names the imported runs and the first problem', () => {
  assert.equal(resultText('one.json', 1, 1, ''), 'one.json: imported');
  assert.equal(resultText('two.jsonl', 2, 2, ''), 'two.jsonl: 2 runs imported');
  assert.equal(resultText('one.json', 0, 1, 'it is not JSON'), 'one.json was not imported: it is not JSON');
  assert.equal(resultText('five.jsonl', 3, 5, 'line 4: it is not JSON'), 'five.jsonl: only 3 of 5 runs imported: line 4: it is not JSON');
});
