#!/usr/bin/env python3
"""Makes a deep model that gives the same answers as a small one, to measure speculative decoding with the small one as its
draft model.

The new layers are copies of the model's layers with output projections of zero, so they take time but change nothing.

    tests/benches/deepen.py fixtures/models/demo.gguf target/deep.gguf LAYERS

LAYERS is the number of layers of the new model. Layers that are described by lists in the metadata are not supported.
"""

import argparse
import pathlib
import struct

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, LIST, U32 = 8, 9, 4
ZERO = ("attn_output.weight", "attn_output.bias", "ffn_down.weight", "ffn_down.bias")


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 8

    def number(self, form):
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def text(self):
        length = self.number("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def skip(self, kind):
        """Skips a value; returns the number of values."""
        if kind == TEXT:
            self.text()
        elif kind == LIST:
            kind, count = self.number("I"), self.number("Q")
            for _ in range(count):
                self.skip(kind)
            return count
        else:
            self.at += SIZES[kind]
        return 1


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def read(data):
    """Returns the metadata, the position of the number of layers in it, that number, and the tensors: name, dimensions, type, bytes."""
    reader = Reader(data)
    count, pairs = reader.number("Q"), reader.number("Q")
    start, layers, lists = reader.at, None, []
    for _ in range(pairs):
        name, kind = reader.text(), reader.number("I")
        if name.endswith(".block_count"):
            assert kind == U32, "the number of layers is not a 32-bit number"
            layers = reader.at
        length = reader.skip(kind)
        if kind == LIST and not name.startswith("tokenizer."):
            lists.append((name, length))
    metadata, position = bytearray(data[start : reader.at]), layers - start
    tensors = []
    for _ in range(count):
        name = reader.text()
        dimensions = [reader.number("Q") for _ in range(reader.number("I"))]
        tensors.append((name, dimensions, reader.number("I"), reader.number("Q")))
    begin = -(-reader.at // 32) * 32
    ends = sorted(offset for *_, offset in tensors)[1:] + [len(data) - begin]
    ends = dict(zip(sorted(offset for *_, offset in tensors), ends))
    tensors = [(*rest, data[begin + offset : begin + ends[offset]]) for *rest, offset in tensors]
    (layer_count,) = struct.unpack_from("<I", metadata, position)
    assert all(length != layer_count for _, length in lists), f"lists of layers: {lists}"
    return pairs, metadata, position, layer_count, tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("layers", type=int)
    args = parser.parse_args()
    pairs, metadata, position, layer_count, tensors = read(args.model.read_bytes())
    assert args.layers > layer_count, f"the model has {layer_count} layers"
    struct.pack_into("<I", metadata, position, args.layers)
    for layer in range(layer_count, args.layers):
        prefix = f"blk.{layer % layer_count}."
        for name, dimensions, kind, values in [tensor for tensor in tensors if tensor[0].startswith(prefix)]:
            part = name.removeprefix(prefix)
            # A block of zero bytes is zero in every type.
            tensors.append((f"blk.{layer}.{part}", dimensions, kind, bytes(len(values)) if part in ZERO else values))
    infos, data = bytearray(), bytearray()
    for name, dimensions, kind, values in tensors:
        infos += text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        infos += struct.pack("<IQ", kind, len(data))
        data += values + bytes(-len(values) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), pairs) + metadata + infos
    args.output.write_bytes(header + bytes(-len(header) % 32) + data)


if __name__ == "__main__":
    main()
