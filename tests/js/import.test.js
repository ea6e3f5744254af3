import test from 'node:test';
import assert from 'node:assert/strict';
import { importProblem } from '../../src/ui/assets/import.js';

test('only documents of a run are sent', () => {
  assert.equal(importProblem('{"request": {}, "events": []}'), '');
  assert.match(importProblem('[1]'), /"request" is missing/);
  assert.match(importProblem('<!doctype html>'), /it is a page/);
  assert.match(importProblem('{'), /not JSON/);
});
