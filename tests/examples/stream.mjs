// Streams a run over WS /generate and changes it while it runs; needs nothing but Node 22, or a browser.
//
//     node tests/examples/stream.mjs "Once upon a time" [http://127.0.0.1:6767]
//
// If the server has keys, set the environment variable THUNDER_API_KEY. A browser cannot send headers with a WebSocket, so the key is
// sent in the first message.

const [prompt = 'Once upon a time', base = 'http://127.0.0.1:6767'] = process.argv.slice(2);
const socket = new WebSocket(`${base.replace(/^http/, 'ws')}/generate`);
const send = (message) => socket.send(JSON.stringify(message));
let text = '';
let ended = false;
let changed = false;

socket.onopen = () => {
  const key = process.env.THUNDER_API_KEY;
  if (key) send({ type: 'auth', api_key: key });
  send({
    type: 'config',
    prompt,
    parameters: { max_tokens: 60, temperature: 0.7 },
    options: { generated_text: 'delta' },
  });
};

socket.onmessage = ({ data }) => {
  const message = JSON.parse(data);
  switch (message.type) {
    case 'init':
      console.error(`run ${message.run_id} of ${message.model}`);
      break;
    case 'token':
      text += message.token;
      if (message.index === 10) {
        changed = true;
        send({ type: 'control', action: 'modify', parameters: { temperature: 0.2 } });
      }
      break;
    case 'backtrack':
      text = text.slice(0, text.length - message.removed_text.length);
      break;
    case 'status':
      console.error(`${message.operation}: ${message.message}`);
      if (message.operation === 'feedback') socket.close();
      break;
    case 'completion':
      ended = true;
      if (text !== message.generated_text) throw new Error('the streamed text differs from the final one');
      console.log(text);
      console.error(message.finish_reason, message.usage);
      send({ type: 'feedback', rating: 1, text: 'from the example' });
      break;
    case 'error':
      // The run may end before the change arrives.
      if (ended || (changed && message.error === 'invalid_request')) break;
      console.error(`${message.error}: ${message.message}`);
      process.exitCode = 1;
      socket.close();
      break;
  }
};

socket.onerror = (event) => {
  console.error(event.message ?? 'cannot connect');
  process.exitCode = 1;
};
