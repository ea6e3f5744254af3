"""The table of Thunder and llama-server: models, parsing of streams, and the rendered table."""

import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "benches/table"
sys.path.insert(0, str(TABLE))

import client  # noqa: E402
import models  # noqa: E402
import table  # noqa: E402


class Models(unittest.TestCase):
    def test_vocabulary_has_distinct_tokens_for_words_of_three_letters(self):
        texts = [text for text, _ in models.tokens()]
        self.assertEqual(len(texts), models.VOCABULARY)
        self.assertEqual(len(set(texts)), models.VOCABULARY)
        words = models.text(64, 7).split()
        self.assertEqual(len(words), 63)
        self.assertLessEqual({f"▁{word}" for word in words}, set(texts))

    def test_file_is_complete(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "small.gguf"
            models.write(path, "small", models.Size(layers=2, width=32, heads=2, hidden=64))
            data = path.read_bytes()
        self.assertEqual(data[:4], b"GGUF")
        # Embedding, final norm, and nine tensors of each layer.
        self.assertEqual(int.from_bytes(data[8:16], "little"), 2 + 2 * 9)
        values = models.VOCABULARY * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64)
        self.assertGreater(len(data), 2 * values)


class Streams(unittest.TestCase):
    def parse(self, pieces, count, prompt_tokens):
        stream = types.SimpleNamespace(pieces=pieces, name="test")
        client.Stream.parse(stream, count, prompt_tokens)
        return stream

    def test_text_has_the_time_of_the_piece_that_completes_its_line(self):
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
        pieces = [
            (1.0, b'HTTP/1.1 200 OK\r\n\r\n2a\r\ndata: {"choices":[{"text":""}]}\n\n\r\n'),
            (2.0, b'2a\r\ndata: {"choices":[{"te'),
            (3.0, b'xt":"a"}]}\n\n\r\n2a\r\ndata: {"choices":[{"text":"b"}]}\n\n\r\n'),
            (4.0, usage),
            (5.0, b""),
        ]
        stream = self.parse(pieces, 3, 4)
        self.assertEqual(stream.times, [3.0, 3.0])
        self.assertEqual(stream.tokens_per_piece, 1.5)

    def test_answer_of_another_length_ends_the_measurement(self):
        pieces = [(1.0, b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":4,"completion_tokens":2}}\n\n')]
        with self.assertRaisesRegex(SystemExit, r"test answered \(4, 2\) tokens, expected \(4, 3\)"):
            self.parse(pieces, 3, 4)


class Table(unittest.TestCase):
    def test_ratios_are_above_one_where_thunder_is_better(self):
        seen = {"thunder": {"whole": [20.0], "first": [0.5]}, "llama-server": {"whole": [10.0], "first": [1.0]}}
        self.assertEqual(table.ratios("whole", seen), [2.0])
        self.assertEqual(table.ratios("first", seen), [2.0])

    def test_table_has_medians_machine_and_date(self):
        values = {value: [1.0, 3.0, 2.0] for value in table.VALUES}
        info = {"machine": "2 cores", "date": "2026-01-02", "rounds": 3, "flags": "--parallel 8"}
        cells = {"15M-F16 64+96 1 4": {"thunder": values, "llama-server": {value: [1.0, 1.0, 1.0] for value in values}}}
        starts = {"cold": [0.8, 0.9], "thunder": [0.3, 0.3], "llama-server": [0.4, 0.4]}
        text = table.render({"info": info, "cells": cells, "starts": starts, "idle": 41.0})
        self.assertIn("2 cores, 2026-01-02; 3 rounds", text)
        self.assertIn("| 15M F16 | 64+96 | 1 | 4 | 2.00 (2 / 1) | 2.00 | 0.50 (2000.0 / 1000.0) | 0.50 |", text)
        self.assertIn("| 0.85 | 0.90 |", text)

    def test_missing_programs_are_named(self):
        for arguments, message in [
            (["--thunder", sys.executable], "llama-server not found: give its path with --rival"),
            (["--thunder", "/nowhere/thunder", "--rival", sys.executable], "Thunder's release build not found: no program at /nowhere/thunder"),
            (["--thunder", sys.executable, "--rival", sys.executable, "--quantize", "/nowhere"], "llama-quantize not found"),
        ]:
            result = subprocess.run([sys.executable, TABLE / "table.py", *arguments], capture_output=True, text=True)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn(message, result.stderr)


if __name__ == "__main__":
    unittest.main()
