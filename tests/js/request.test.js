// Conversion between the form of the playground, requests and recorded runs.
import test from 'node:test';
import assert from 'node:assert/strict';
import { curlOf, differences, extraFields, formOf, missingInput, requestOf } from '../../src/ui/assets/playground/request.js';

const form = {
  tab: 'chat', raw: '', stop: 'a\n\nb', attention: true, model: 'm',
  messages: [{ role: 'user', content: 'hi' }, { role: 'user', content: '' }],
  numbers: { temperature: '0.5', seed: '' },
  mods: [{ name: 'x', config: '{"a": 1}' }, { name: 'y', config: ' ' }],
};

test('form is converted to a request of the public API', () => {
  const { path, body } = requestOf(form);
  assert.equal(path, '/v1/chat/completions');
  assert.deepEqual(body, {
    model: 'm', messages: [{ role: 'user', content: 'hi' }], temperature: 0.5, stop: ['a', 'b'],
    mods: [{ name: 'x', config: { a: 1 } }, { name: 'y' }], attention: true, stream: true,
  });
  assert.equal(requestOf({ ...form, tab: 'raw', raw: 'Once' }).body.prompt, 'Once');
  assert.equal(requestOf({ ...form, ...formOf({ parameters: { lens: true } }), messages: form.messages, stop: '' }).body.lens, true);
  assert.throws(() => requestOf({ ...form, mods: [{ name: 'x', config: '{' }] }), /configuration of x/);
  assert.equal(missingInput({ ...form, messages: [] }), 'Write a message first.');
  assert.equal(missingInput(form), null);
});

test('curl command quotes its arguments', () => {
  const request = { path: '/v1/completions', body: { prompt: "it's" } };
  const line = curlOf(request, 'http://h:1', '');
  assert.ok(line.includes("it'\\''s") && line.startsWith('curl -N http://h:1/v1/completions'));
  assert.ok(!line.includes('Authorization'));
  assert.ok(curlOf(request, 'http://h:1', 'THUNDER_API_KEY').includes(' \\\n  -H "Authorization: Bearer $THUNDER_API_KEY" \\\n'));
});

test('recorded run fills the form', () => {
  const back = formOf({ conversation: [{ role: 'user', content: 'hi' }], parameters: { sampling: { temperature: 0.1, top_k: 3 }, limits: { max_tokens: 5, stop: ['x', 'y'] } } }, { mods: ['m'], model: 'other' });
  assert.deepEqual(back, { tab: 'chat', messages: [{ role: 'user', content: 'hi' }], numbers: { temperature: 0.1, top_k: 3, max_tokens: 5 }, stop: 'x\ny', mods: [{ name: 'm', config: '' }], tools: '', schema: '', extra: '', steering: null, lens: false, model: 'other' });
  assert.equal(formOf({ texts: ['a', 'b'] }).raw, 'ab');
  assert.equal(formOf({ parameters: { model: { name: 'recorded' } } }, { model: 'other' }).model, 'recorded');
  assert.deepEqual([formOf(undefined).tab, formOf(undefined).model], [undefined, '']);
});

test('tools, format and biases of a recorded run are restored', () => {
  const tools = [{ type: 'function', function: { name: 'f' } }];
  const call = { id: 'c', type: 'function', function: { name: 'f', arguments: '{}' } };
  const request = { tool_choice: 'required', response_format: { type: 'json_object' }, logit_bias: { 5: -3 } };
  const conversation = [
    { role: 'user', content: [{ type: 'text', text: 'a' }, { type: 'text', text: 'b' }] },
    { role: 'assistant', content: null, tool_calls: [call] },
    { role: 'tool', content: '1', tool_call_id: 'c' },
  ];
  const back = formOf({ conversation, tools, parameters: { request, model: { name: 'm' } } });
  const { body } = requestOf({ ...form, mods: [], numbers: {}, stop: '', attention: false, ...back });
  assert.deepEqual(body, {
    model: 'm', messages: [{ role: 'user', content: 'a\nb' }, ...conversation.slice(1)], tools, ...request, stream: true,
  });
  const adapters = { lora: [{ id: 0, scale: 1 }] };
  const steering = [{ name: 'calm', scale: 2, layers: [1, 3] }];
  const steered = formOf({ parameters: { ...adapters, steering } });
  assert.deepEqual([JSON.parse(steered.extra), steered.steering], [adapters, steering]);
  assert.deepEqual(requestOf({ ...form, steering }).body.steering, steering);
  assert.deepEqual(requestOf({ ...form, steering: [] }).body.steering, [], 'no control vectors');
  assert.equal('steering' in requestOf({ ...form, steering: null }).body, false, 'the default of the server');
  assert.deepEqual(differences({ ...form, steering: [] }, { ...form, steering }), [{ name: 'steering', before: 'off', after: 'calm 2, layers 1–3' }]);
  assert.deepEqual(JSON.parse(extraFields({ parameters: { ...adapters, request } }, true)), { ...adapters, logit_bias: { 5: -3 } });
  const older = { parameters: { sampling: { logit_bias: [[7, 2], [8, null]] }, limits: {} } };
  assert.deepEqual(JSON.parse(extraFields(older)), { logit_bias: [[7, 2], [8, false]] });
  assert.deepEqual(JSON.parse(extraFields({ tools, parameters: { request } }, true)), { logit_bias: { 5: -3 } }, 'a continued text omits parameters that apply to a whole answer');
  assert.throws(() => requestOf({ ...form, extra: '[1]' }), /JSON object/);
  assert.throws(() => requestOf({ ...form, extra: '{' }), /fields must be JSON: /);
});

test('form of a run without recorded parameters has the values of its summary', () => {
  const summary = { model: 'm', temperature: 0.7, max_tokens: 99, seed: null, mods: ['x'] };
  const { numbers, model, mods, stop } = formOf({ texts: ['a'] }, summary);
  assert.deepEqual([numbers, model, mods, stop], [{ temperature: 0.7, max_tokens: 99 }, 'm', [{ name: 'x', config: '' }], undefined]);
  assert.deepEqual(formOf({ texts: ['a'], parameters: { sampling: { top_k: 3 } } }, summary).numbers, { top_k: 3 }, 'recorded parameters are complete');
});

test('schema of the form is sent as response format, and read back', () => {
  const schema = { type: 'object', properties: { a: { type: 'integer' } } };
  const { body } = requestOf({ ...form, schema: JSON.stringify(schema) });
  assert.deepEqual(body.response_format, { type: 'json_schema', json_schema: { name: 'answer', schema } });
  const back = formOf({ parameters: { request: { response_format: body.response_format, tool_choice: 'auto' } } });
  assert.deepEqual(JSON.parse(back.schema), schema);
  assert.deepEqual(JSON.parse(back.extra), { tool_choice: 'auto' });
  const named = { type: 'json_schema', json_schema: { name: 'n', schema } };
  assert.deepEqual(JSON.parse(formOf({ parameters: { request: { response_format: named } } }).extra), { response_format: named });
  assert.throws(() => requestOf({ ...form, tools: '{}' }), /tools must be a JSON array/);
  assert.throws(() => requestOf({ ...form, schema: '[]' }), /JSON schema must be a JSON object/);
  const tools = '[{"type": "function", "function": {"name": "f"}}]';
  assert.equal(requestOf({ ...form, tools }).body.tools.length, 1);
  assert.equal(requestOf({ ...form, tab: 'raw', raw: 'a', tools }).body.tools, undefined);
});

test('differences name the fields that differ from the original form', () => {
  const same = { ...form, numbers: { temperature: 0.50, seed: '' }, mods: [{ name: 'x', config: '{"a":1}' }, { name: 'y', config: '' }] };
  assert.deepEqual(differences(form, same), [], 'other spellings of the same values');
  assert.deepEqual(differences(form, { ...form, numbers: { temperature: '1', seed: '4' }, mods: form.mods.slice(1), messages: [{ role: 'user', content: 'ho' }], lens: true, model: 'n' }), [
    { name: 'model', before: 'm', after: 'n' },
    { name: 'temperature', before: '0.5', after: '1' },
    { name: 'seed', before: '', after: '4' },
    { name: 'mods', before: 'x {"a":1}, y', after: 'y' },
    { name: 'logit lens', before: '', after: 'recorded' },
    { name: 'prompt', before: 'user: hi', after: 'user: ho' },
  ]);
});
