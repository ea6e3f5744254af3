"""Chats through LiteLLM's provider for Ollama."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download of prices

import litellm  # noqa: E402

common = {
    "model": "ollama_chat/tiny",
    "api_base": sys.argv[1],
    "messages": [{"role": "user", "content": "Hello!"}],
    "max_tokens": 30,
}
mods = [{"name": "force-prefix", "config": {"text": "Good day.<|im_end|>"}}]
answer = litellm.completion(**common, mods=mods)
assert answer.choices[0].message.content == "Good day.", answer
assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 0, answer
parts = list(litellm.completion(**common, mods=mods, stream=True))
assert "".join(part.choices[0].delta.content or "" for part in parts) == "Good day.", parts
embedded = litellm.embedding(model="ollama/tiny", api_base=sys.argv[1], input=["Hello!"])
assert len(embedded.data[0]["embedding"]) > 1, embedded
