// The tokens of the next-token mode.
import test from 'node:test';
import assert from 'node:assert/strict';
import { TokenChain } from '../../src/ui/assets/playground/next-token.js';

test('chosen tokens are kept as ids until the text or the model changes', () => {
  const chain = new TokenChain();
  assert.equal(chain.idsOf('', 'm'), null, 'the empty text must be tokenized too');
  chain.start('Once', [1, 40], 'm');
  const text = chain.append(7, ' upon');
  assert.equal(text, 'Once upon');
  assert.deepEqual(chain.idsOf(text, 'm'), [1, 40, 7]);
  assert.equal(chain.append(9, ''), text, 'a token without text');
  assert.deepEqual(chain.idsOf(text, 'm'), [1, 40, 7, 9]);
  assert.equal(chain.idsOf(text, 'n'), null, 'another model has other tokens');
  assert.equal(chain.idsOf('Once up', 'm'), null);
  assert.equal(chain.undo(), text);
  assert.equal(chain.undo(), 'Once');
  assert.equal(chain.chosenCount, 0);
  assert.equal(chain.undo(), 'Once', 'only chosen tokens are removed');
  assert.deepEqual(chain.idsOf('Once', 'm'), [1, 40]);
});
