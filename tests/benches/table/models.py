"""Llama models with random weights, as GGUF files, without any package."""

import itertools
import math
import random
import string
import struct
import subprocess
from dataclasses import dataclass

VOCABULARY = 32000
CONTEXT = 4096
LETTERS = string.ascii_lowercase
ALIGNMENT = 32
# Normal tokens, the unknown token, control tokens and bytes.
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
F32, F16 = 0, 1


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    hidden: int


# The shapes of the models that were trained on TinyStories, and a model for GPUs; the output matrix is the embedding.
SIZES = {"15M": Size(6, 288, 6, 768), "110M": Size(12, 768, 12, 2048), "1B": Size(22, 2048, 16, 5632)}
KINDS = ("F16", "Q8_0", "Q4_0")


def tokens():
    """Returns text and type of each token. A space and three letters are one token, into which shorter tokens are merged."""
    yield "<unk>", UNKNOWN
    yield "<s>", CONTROL
    yield "</s>", CONTROL
    for byte in range(256):
        yield f"<0x{byte:02X}>", BYTE
    for letter in LETTERS:
        yield letter, NORMAL
    words = itertools.chain.from_iterable(itertools.product(LETTERS, repeat=length) for length in itertools.count())
    for word in itertools.islice(words, VOCABULARY - 259 - len(LETTERS)):
        yield "▁" + "".join(word), NORMAL


def text(count, seed):
    """Returns a text of `count` tokens, including BOS."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices(LETTERS, k=3)) for _ in range(count - 1))


class Writer:
    """Pairs and tensors of a GGUF file. The data of the tensors is generated while the file is written."""

    def __init__(self):
        self.pairs, self.tensors = [], []

    @staticmethod
    def _text(value):
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    def number(self, name, value):
        self.pairs.append(self._text(name) + struct.pack("<II", 4, value))

    def real(self, name, value):
        self.pairs.append(self._text(name) + struct.pack("<If", 6, value))

    def text(self, name, value):
        self.pairs.append(self._text(name) + struct.pack("<I", 8) + self._text(value))

    def list(self, name, kind, values):
        packed = b"".join(map(self._text, values)) if kind == 8 else struct.pack(f"<{len(values)}{'i' if kind == 5 else 'f'}", *values)
        self.pairs.append(self._text(name) + struct.pack("<IIQ", 9, kind, len(values)) + packed)

    def tensor(self, name, extents, kind, make):
        self.tensors.append((name, extents, kind, make))

    def write(self, path):
        offset, infos = 0, []
        for name, extents, kind, _ in self.tensors:
            infos.append(self._text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, offset))
            size = math.prod(extents) * (2 if kind == F16 else 4)
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        with open(path, "wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.pairs)))
            file.writelines(self.pairs)
            file.writelines(infos)
            for _, extents, _, make in self.tensors:
                file.write(bytes(-file.tell() % ALIGNMENT))
                make(file, math.prod(extents))


def ones(file, count):
    file.write(struct.pack("<f", 1.0) * count)


def normal(deviation, seed):
    """Fills a tensor with normally distributed numbers, taken from random positions of one list."""

    def make(file, count):
        draw = random.Random(seed)
        pool = struct.pack("<65536e", *(draw.gauss(0.0, deviation) for _ in range(65536)))
        while count > 0:
            begin = draw.randrange(0, len(pool) // 2) // 2 * 2
            piece = pool[begin : begin + 2 * min(count, 32768)]
            file.write(piece)
            count -= len(piece) // 2

    return make


def write(path, name, size):
    """Writes a model with weights of 16 bits."""
    writer = Writer()
    writer.text("general.architecture", "llama")
    writer.text("general.name", f"random {name}")
    writer.number("general.file_type", 1)
    writer.number("llama.context_length", CONTEXT)
    writer.number("llama.embedding_length", size.width)
    writer.number("llama.block_count", size.layers)
    writer.number("llama.feed_forward_length", size.hidden)
    writer.number("llama.attention.head_count", size.heads)
    writer.number("llama.attention.head_count_kv", size.heads)
    writer.number("llama.rope.dimension_count", size.width // size.heads)
    writer.number("llama.vocab_size", VOCABULARY)
    writer.real("llama.attention.layer_norm_rms_epsilon", 1e-5)
    texts, types = zip(*tokens())
    writer.text("tokenizer.ggml.model", "llama")
    writer.list("tokenizer.ggml.tokens", 8, texts)
    # Longer tokens have higher scores, so that they are merged.
    writer.list("tokenizer.ggml.scores", 6, [0.0 if kind != NORMAL else -10.0 + len(piece) for piece, kind in zip(texts, types)])
    writer.list("tokenizer.ggml.token_type", 5, types)
    writer.number("tokenizer.ggml.bos_token_id", 1)
    writer.number("tokenizer.ggml.eos_token_id", 2)
    writer.number("tokenizer.ggml.unknown_token_id", 0)
    seed = 0

    def matrix(tensor, inputs, outputs, scale=1.0):
        nonlocal seed
        seed += 1
        writer.tensor(tensor, (inputs, outputs), F16, normal(scale / math.sqrt(inputs), seed))

    matrix("token_embd.weight", size.width, VOCABULARY)
    for layer in range(size.layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.tensor(f"blk.{layer}.{norm}.weight", (size.width,), F32, ones)
        for tensor in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{tensor}.weight", size.width, size.width)
        for tensor in ("ffn_gate", "ffn_up"):
            matrix(f"blk.{layer}.{tensor}.weight", size.width, size.hidden)
        matrix(f"blk.{layer}.ffn_down.weight", size.hidden, size.width)
    writer.tensor("output_norm.weight", (size.width,), F32, ones)
    writer.write(path)


def prepare(folder, name, quantize):
    """Writes the model of this name, such as `110M-Q4_0`, if it is not in the folder. Returns its path."""
    path = folder / f"{name}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    size, _, kind = name.partition("-")
    unfinished = path.with_suffix(".part")
    if kind == "F16":
        write(unfinished, size, SIZES[size])
    else:
        source = prepare(folder, f"{size}-F16", quantize)
        command = [quantize, source, unfinished, kind]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    unfinished.rename(path)
    return path
