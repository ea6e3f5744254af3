import test from 'node:test';
import assert from 'node:assert/strict';
import { unfit } from '../../src/ui/assets/import.js';

test('only documents of a run are sent', () => {
  assert.equal(unfit('{"request": {}, "events": []}'), '');
  assert.match(unfit('[1]'), /"request" is missing/);
  assert.match(unfit('<!doctype html>'), /it is a page/);
  assert.match(unfit('{'), /not JSON/);
});
