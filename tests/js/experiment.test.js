import test from 'node:test';
import assert from 'node:assert/strict';
import {
  csvRows, definitionOf, fieldOf, formOf, modsOf, parametersOf, promptsOf, seedsOf, seedsText,
} from '../../src/ui/assets/experiment-definition.js';

const form = {
  name: ' greetings ', model: '', prompts: 'Hello\n\nThe sky\n', format: 'lines', seeds: '1-3, 7', mods: 'none\nban-phrases {"phrases": ["a, }b"]}, log-top',
  parameters: 'temperature=0.2 max_tokens=6\n{"stop": ["x y"]}', scorer: 'regex', regex: '^a', python: '',
};

test('definition has the values of the form', () => {
  assert.deepEqual(definitionOf(form), {
    name: 'greetings',
    prompts: ['Hello', 'The sky'],
    seeds: [1, 2, 3, 7],
    mods: [[], [{ name: 'ban-phrases', config: { phrases: ['a, }b'] } }, { name: 'log-top' }]],
    parameters: [{ temperature: 0.2, max_tokens: 6 }, { stop: ['x y'] }],
    score: { regex: '^a' },
  });
});

test('form of a definition gives the same definition', () => {
  const definition = {
    ...definitionOf(form), model: 'demo', prompts: ['two\n"lines"', 'one'],
    mods: [[], [{ name: 'a', config: { x: [1, '{'] } }, { name: 'b' }], [{ name: 'c', version: 'v' }]],
    parameters: [{}, { logit_bias: [[1, false]] }, { samplers: 'top_k;min_p', n_probs: 1 }], score: { json: true },
  };
  assert.deepEqual(definitionOf(formOf(definition)), definition);
  const scored = { ...definition, score: { python: 'def score(text):\n    return 1\n' } };
  assert.deepEqual(definitionOf(formOf(scored)), scored);
});

test('seeds are numbers and ranges', () => {
  assert.deepEqual(seedsOf('4294967295'), [4294967295]);
  assert.equal(seedsText([1, 2, 3, 5, 6, 9]), '1-3, 5, 6, 9');
  assert.throws(() => seedsOf('1-3, 2'), { field: 'seeds', message: 'The seed 2 occurs twice; its runs would be equal. Remove one.' });
  for (const text of ['', '-1', '1.5', 'a', '4294967296', '5-3', '0-99999999']) assert.throws(() => seedsOf(text), { field: 'seeds' }, text);
});

test('prompts of a CSV are its column prompt, else the first one', () => {
  assert.deepEqual(promptsOf('id,Prompt\r\n1,"a, ""b"""\r\n2,"two\nlines"\r\n', 'csv'), ['a, "b"', 'two\nlines']);
  assert.deepEqual(promptsOf('x,1\ny,2', 'csv'), ['x', 'y']);
  assert.throws(() => csvRows('"open'), { field: 'prompts' });
  assert.throws(() => promptsOf(' \n', 'lines'), { field: 'prompts' });
});

test('errors have the name of their field and the line', () => {
  for (const text of ['a b', 'a {"x": 1', 'a {x}', '[1', 'a,, b']) assert.throws(() => modsOf(text), { field: 'mods', message: /^Line 1 of the mods/ }, text);
  for (const text of ['temperature', '{"a"', 'a=']) assert.throws(() => parametersOf(`x=1\n${text}`), { field: 'parameters', message: /^Line 2 of the parameters/ }, text);
  assert.throws(() => definitionOf({ ...form, name: ' ' }), { field: 'name' });
  assert.throws(() => definitionOf({ ...form, regex: '' }), { field: 'score' });
  assert.throws(() => definitionOf({ ...form, scorer: 'python', python: ' \n' }), { field: 'score' });
  assert.throws(() => definitionOf({ ...form, seeds: '1-9999' }), { field: 'seeds', message: /got 79992/ });
});

test('pointer of the server names a field of the form', () => {
  assert.equal(fieldOf('parameters[1].temperature'), 'parameters');
  assert.equal(fieldOf('score.regex'), 'score');
  assert.equal(fieldOf('color'), null);
  assert.equal(fieldOf(undefined), null);
});
