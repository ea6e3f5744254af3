// Streams tokens with their attention over the WebSocket, as binary frames, and prints for each token the earlier one with the most
// attention.
//
//     node tests/examples/attention.mjs [http://127.0.0.1:6767]
//
// Needs Node 22 or newer, or a browser; Node 20 needs --experimental-websocket.

const base = process.argv[2] ?? "http://127.0.0.1:6767";

async function call(path, body) {
  const response = await fetch(base + path, { method: "POST", body: JSON.stringify(body) });
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

// A binary frame: the length of the header, the header as JSON, the values at a multiple of 8 bytes.
function parse(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const message = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return { message, values: new Float32Array(buffer, 4 + length) };
}

const prompt = await call("/api/v1/tokenize", { text: "The sky is blue and the sea is" });
const texts = prompt.tokens.map((token) => token.text);
const socket = new WebSocket(`${base.replace("http", "ws")}/api/v1/generate/stream?compression=off`);
socket.binaryType = "arraybuffer";
socket.onopen = () =>
  socket.send(JSON.stringify({
    type: "generate",
    request_id: "example",
    input_ids: prompt.token_ids,
    max_new_tokens: 5,
    temperature: 0,
    logprobs: true,
    return_attention: true,
    attention_format: "per_layer",
    attention_encoding: "binary",
  }));
const end = await new Promise((resolve, reject) => {
  socket.onerror = () => reject(new Error("the connection failed"));
  socket.onmessage = ({ data }) => {
    if (typeof data === "string") {
      const message = JSON.parse(data);
      if (message.type === "error") reject(new Error(`${message.error_code}: ${message.error}`));
      if (message.type === "done") resolve(message);
      return;
    }
    const { message, values } = parse(data);
    const [layers, heads, positions] = message.attention.shape;
    if (positions !== texts.length) throw new Error("a row must have one value per token");
    const mean = new Float64Array(positions);
    values.forEach((value, index) => (mean[index % positions] += value / (layers * heads)));
    const strongest = mean.indexOf(Math.max(...mean));
    const { text, logprob } = message.token;
    console.log(`${JSON.stringify(text)} (${logprob.toFixed(2)}) attends most to ${JSON.stringify(texts[strongest])}`);
    texts.push(text);
  };
});
socket.close();
console.log(`finish_reason: ${end.finish_reason}, ${end.total_tokens} tokens`);
