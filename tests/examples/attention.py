"""Tokenizes a text, generates from the tokens, and prints for each new token the earlier token with the most attention.

    python3 tests/examples/attention.py [http://127.0.0.1:6767]

Needs only the standard library and reads the whole answer at once; attention.mjs does the same with a stream.
"""

import array
import base64
import json
import sys
import urllib.request

BASE = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:6767"


def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def rows(attention):
    """Returns the rows as [layer][head][position]."""
    values = array.array("f", base64.b64decode(attention["data"]))
    if sys.byteorder == "big":
        values.byteswap()
    layers, heads, positions = attention["shape"]
    at = lambda layer, head: (layer * heads + head) * positions
    return [[values[at(l, h) : at(l, h) + positions] for h in range(heads)] for l in range(layers)]


info = call("/api/v1/model/info")
print(f"{info['model_name']}: {info['num_layers']} layers with {info['num_attention_heads']} heads")
prompt = call("/api/v1/tokenize", {"text": "The sky is blue and the sea is", "add_special_tokens": False})
texts = [token["text"] for token in prompt["tokens"]]
answer = call("/api/v1/generate", {
    "input_ids": prompt["token_ids"],
    "max_new_tokens": 5,
    "temperature": 0,
    "banned_tokens": [info["special_tokens"]["im_start_id"]] if "im_start_id" in info["special_tokens"] else [],
    "return_attention": True,
    "attention_format": "per_layer",
})
for step in answer["attention_data"]:
    tensor = rows(step["attention"])
    assert all(abs(sum(head) - 1) < 1e-3 for layer in tensor for head in layer), "each head's row sums to 1"
    heads = [head for layer in tensor for head in layer]
    mean = [sum(column) / len(heads) for column in zip(*heads)]
    assert len(mean) == len(texts), "a row has one value per token"
    strongest = max(range(len(mean)), key=mean.__getitem__)
    print(f"{step['text']!r} attends most to {texts[strongest]!r} ({mean[strongest]:.3f})")
    texts.append(step["text"])
print(f"finish_reason: {answer['finish_reason']}")
