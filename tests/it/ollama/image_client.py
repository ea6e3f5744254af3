"""Sends an image with the Python clients of Ollama, OpenAI and Anthropic."""

import base64
import sys

import anthropic
import ollama
import openai

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAIAAAAiZtkUAAAAGElEQVR4nGNkYGjQYGBARiwMNgxogDghAHPAAgoN/kQJAAAAAElFTkSuQmCC"
)

client = ollama.Client(host=sys.argv[1])
assert "vision" in client.show("demo").capabilities
question = {"role": "user", "content": "What is this?", "images": [base64.b64decode(PNG)]}
answer = client.chat(model="demo", messages=[question], options={"num_predict": 4, "temperature": 0})
assert answer.message.content and answer.prompt_eval_count > 64, answer
generated = client.generate(model="demo", prompt="What is this?", images=[PNG], options={"num_predict": 4, "temperature": 0})
assert generated.response == answer.message.content, generated

openai_client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
url = "data:image/png;base64," + PNG
parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
completion = openai_client.chat.completions.create(
    model="demo", messages=[{"role": "user", "content": parts}], max_tokens=4, temperature=0
)
assert completion.choices[0].message.content == answer.message.content, completion
items = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": "What is this?"}]
response = openai_client.responses.create(
    model="demo", input=[{"role": "user", "content": items}], max_output_tokens=4, temperature=0
)
assert response.output_text == answer.message.content, response
try:
    parts[0]["image_url"]["url"] = "https://example.org/a.png"
    openai_client.chat.completions.create(model="demo", messages=[{"role": "user", "content": parts}])
    raise SystemExit("an address was accepted")
except openai.BadRequestError as error:
    assert "data URL" in str(error), error

anthropic_client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none")
source = {"type": "base64", "media_type": "image/png", "data": PNG}
blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
messages = [{"role": "user", "content": blocks}]
# Not every version of the client has this parameter.
greedy = {"temperature": 0}
message = anthropic_client.messages.create(model="demo", messages=messages, max_tokens=4, extra_body=greedy)
assert message.content[0].text == answer.message.content, message
counted = anthropic_client.messages.count_tokens(model="demo", messages=messages)
usage = message.usage
assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens > 64, (counted, message)
with anthropic_client.messages.stream(model="demo", messages=messages, max_tokens=4, extra_body=greedy) as stream:
    assert "".join(stream.text_stream) == answer.message.content
try:
    source = {"type": "url", "url": "https://example.org/a.png"}
    blocks[0]["source"] = source
    anthropic_client.messages.create(model="demo", messages=messages, max_tokens=4)
    raise SystemExit("an address was accepted")
except anthropic.BadRequestError as error:
    assert "--allow-image-urls" in str(error), error
