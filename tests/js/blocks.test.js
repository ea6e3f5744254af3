// Roles and blocks of the text.
import test from 'node:test';
import assert from 'node:assert/strict';
import { mayEndBlock, rolesOf } from '../../src/ui/assets/replay/blocks.js';

test('template text is attributed to its message', () => {
  const texts = ['<s>', 'user', '\n', 'Hi', '<e>', '\n', '<s>', 'assistant', '\n'];
  const spans = [{ role: 'template', start: 0, end: 3 }, { role: 'user', start: 3, end: 4 }, { role: 'template', start: 4, end: 9 }];
  assert.deepEqual(rolesOf(9, spans, texts).map((r) => r.role), ['user', 'user', 'user', 'user', 'user', 'user', 'answer', 'answer', 'answer']);
  assert.equal(rolesOf(9, spans, texts)[3].dim, false);
  assert.equal(rolesOf(2, undefined, []).length, 2);
});

test('template text of several lines between messages has its own role', () => {
  const texts = ['<s>', 'user', '\n', 'Hi', '<e>', '\n', '<s>', 'assistant', '\n', '<call>', '\n', '<e>', '\n', '<s>', 'tool', '\n', '\n', '21', '<e>', '\n', '<s>', 'assistant', '\n', '<think>', '\n'];
  const spans = [[0, 3, 'template'], [3, 4, 'user'], [4, 17, 'template'], [17, 18, 'tool'], [18, 25, 'template']].map(([start, end, role]) => ({ role, start, end }));
  const roles = rolesOf(texts.length, spans, texts).map((r) => r.role);
  assert.deepEqual(roles, [...Array(6).fill('user'), ...Array(7).fill('template'), ...Array(7).fill('tool'), ...Array(5).fill('answer')]);
});

test('a block ends after a line, a sentence or the maximum of rows', () => {
  assert.equal(mayEndBlock(100, '\n'), false);
  assert.equal(mayEndBlock(128, 'x\n'), true);
  assert.equal(mayEndBlock(512, ' x'), false);
  assert.equal(mayEndBlock(512, ' x.”'), true);
  assert.equal(mayEndBlock(1024, ' x'), true);
});
