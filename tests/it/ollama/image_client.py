"""Sends an image with the Python clients of Ollama and OpenAI."""

import base64
import sys

import ollama
import openai

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAIAAAAiZtkUAAAAGElEQVR4nGNkYGjQYGBARiwMNgxogDghAHPAAgoN/kQJAAAAAElFTkSuQmCC"
)

client = ollama.Client(host=sys.argv[1])
assert "vision" in client.show("demo").capabilities
asked = {"role": "user", "content": "What is this?", "images": [base64.b64decode(PNG)]}
answer = client.chat(model="demo", messages=[asked], options={"num_predict": 4, "temperature": 0})
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
