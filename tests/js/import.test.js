import test from 'node:test';
import assert from 'node:assert/strict';
import { documentsIn, importProblem } from '../../src/ui/assets/import.js';

test('only documents of a run are sent', () => {
  assert.equal(importProblem('{"request": {}, "events": []}'), '');
  assert.match(importProblem('[1]'), /"request" is missing/);
  assert.match(importProblem('<!doctype html>'), /it is an HTML file/);
  assert.match(importProblem('{'), /not JSON/);
});

test('file of JSON lines has one document per line', () => {
  assert.deepEqual(documentsIn('runs.jsonl', '{"a": 1}\n\n{"b": 2}\n'), ['{"a": 1}', '{"b": 2}']);
  assert.deepEqual(documentsIn('run.json', '{\n}\n'), ['{\n}\n']);
});
