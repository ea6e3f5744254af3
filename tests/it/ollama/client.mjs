// Chats, generates text and lists models with Ollama's JavaScript client.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2] });
const forcedAnswer = (text) => [{ name: "force-prefix", config: { text: `${text}<|im_end|>` } }];

const { models } = await client.list();
assert.deepEqual(models.map((model) => model.name), ["tiny:latest"]);
assert.equal((await client.ps()).models[0].name, "tiny:latest");
assert.equal((await client.show({ model: "tiny" })).details.format, "gguf");
assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);

const messages = [{ role: "user", content: "Hello!" }];
const options = { num_predict: 20, mods: forcedAnswer("Good day.") };
const answer = await client.chat({ model: "tiny", messages, options });
assert.equal(answer.message.content, "Good day.");
assert.equal(answer.done_reason, "stop");
let text = "";
let last;
for await (const part of await client.chat({ model: "tiny", messages, options, stream: true })) {
  text += part.message.content;
  last = part;
}
assert.equal(text, "Good day.");
assert.equal(last.done, true);
const generated = await client.generate({ model: "tiny", prompt: "Once", options: { num_predict: 20, mods: forcedAnswer("Then.") } });
assert.equal(generated.response, "Then.");
const embedded = await client.embed({ model: "tiny", input: "Hello!" });
assert.equal(embedded.embeddings.length, 1);
await assert.rejects(client.chat({ model: "tiny", messages: [{ role: "user", content: "?", images: ["aGk="] }] }), /images/);
