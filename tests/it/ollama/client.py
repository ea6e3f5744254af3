"""Uses every route with Ollama's Python client."""

import json
import sys

import ollama

client = ollama.Client(host=sys.argv[1])


def forced_answer(text: str) -> list[dict]:
    """Returns the mods of a request that force this answer."""
    return [{"name": "force-prefix", "config": {"text": text + "<|im_end|>"}}]


[model] = client.list().models
assert model.model == "tiny:latest" and len(model.digest) == 64 and model.size > 0 and model.details.format == "gguf", model
shown = client.show(model.model)
assert shown.modelinfo["general.architecture"] == model.details.family, shown
assert "completion" in shown.capabilities and "tools" in shown.capabilities, shown
[running] = client.ps().models
assert running.model == "tiny:latest" and running.context_length > 0, running

messages = [{"role": "user", "content": "Hello!"}]
options = {"num_predict": 30, "mods": forced_answer("<think>hm</think>Good day.")}
answer = client.chat(model="tiny", messages=messages, options=options, think=True)
assert answer.message.content == "Good day.", answer
assert answer.message.thinking == "hm", answer
assert answer.done and answer.done_reason == "stop" and answer.total_duration > 0, answer
parts = list(client.chat(model="tiny", messages=messages, options=options, think=True, stream=True))
assert "".join(part.message.content or "" for part in parts) == "Good day.", parts
assert "".join(part.message.thinking or "" for part in parts) == "hm", parts
assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True], parts
assert parts[-1].eval_count == answer.eval_count, parts


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number
        b: The second number
    """
    return a + b


call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
called = client.chat(model="tiny", messages=messages, tools=[add], options={"num_predict": 80, "mods": forced_answer(call)})
[tool_call] = called.message.tool_calls
assert tool_call.function.name == "add" and tool_call.function.arguments == {"a": 1, "b": 2}, called
messages += [called.message, {"role": "tool", "tool_name": "add", "content": str(add(**tool_call.function.arguments))}]
final = client.chat(model="tiny", messages=messages, tools=[add], options={"num_predict": 20, "mods": forced_answer("Three.")})
assert final.message.content == "Three.", final

schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
constrained = client.chat(model="tiny", messages=messages[:1], format=schema, think=False, options={"num_predict": 60})
assert json.loads(constrained.message.content) in ({"n": 1}, {"n": 2}), constrained

generated = client.generate(model="tiny", prompt="Once", options={"num_predict": 20, "mods": forced_answer(" upon a time.")})
assert generated.response.strip() == "upon a time." and generated.context, generated
streamed = client.generate(model="tiny", prompt="Once", raw=True, options={"num_predict": 5, "seed": 1}, stream=True)
streamed = list(streamed)
assert streamed[-1].done and streamed[-1].eval_count <= 5 and streamed[-1].context is None, streamed

embedded = client.embed(model="tiny", input=["Hello!", "Once"])
assert len(embedded.embeddings) == 2 and len(embedded.embeddings[0]) == len(embedded.embeddings[1]), embedded
assert len(client.embeddings(model="tiny", prompt="Hello!").embedding) == len(embedded.embeddings[0])

try:
    client.chat(model="tiny", messages=messages[:1], options={"temperature": "hot"})
    raise SystemExit("a wrong option was accepted")
except ollama.ResponseError as error:
    assert error.status_code == 400 and "temperature" in error.error, error
