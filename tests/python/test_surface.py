"""Names that mods import, and helper functions."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest
from array import array
from unittest import mock

import thunder_mods
import thunder_mods.logits
from thunder_mods import last_message, serialize_mod, text_of, tool_call, tool_call_pairs
from thunder_mods.logits import Logits, flat, numpy, top_k_logprob
from thunder_mods.testing.action_check import action_error
from thunder_mods.worker.serve import Worker

SDK = pathlib.Path(__file__).parents[2] / "src/mods/python/sdk"

QUOTE = """
from quote_mod_sdk import (ActionBuilder, Added, AdjustedLogits, AdjustedPrefill, Backtrack, ForceOutput, ForceTokens,
    ForwardPass, InvalidActionError, ModCallable, ModEvent, Noop, Prefilled, Sampled, ToolCalls, create_mod, for_event,
    get_conversation, get_schemas, mod, self_prompt_mod, serialize_mod, tokenize, tool_call_pairs, validate_action)
from quote_mod_sdk.mod import ActionBuilder, InvalidActionError, ModCallable, create_mod, mod, validate_action
from quote_mod_sdk.actions import ActionBuilder, InvalidActionError, for_event
from quote_mod_sdk.conversation import get_conversation, get_schemas, tool_call_pairs
from quote_mod_sdk.serialization import serialize_mod
from quote_mod_sdk.tokenizer import tokenize
from quote_mod_sdk.self_prompt import EraseMode, SelfPrompt, self_prompt_mod
from quote_mod_sdk.flow import (FlowDefinition, FlowEngine, FlowQuestion, FlowRoute, FlowState, RequestState, RouteKind,
    RouteTarget, route_message, route_noop, route_output, route_question, route_summary, route_tool)
from quote_mod_sdk.strategies import CharsMode, CharsStrat, ChoicesStrat, ListStrat, RuntimeState, Strategy, UntilStrat
from quote_mod_sdk.strategies.base import RuntimeState, Strategy, decode_token, require_token_ids, tokenize_str
from quote_mod_sdk.strategies.primitives import CharsMode, CharsStrategy, TokensStrategy, UntilEndType, UntilStrategy
from quote_mod_sdk.strategies.list_strategy import ListStrategy
from quote_mod_sdk.strategies.strategy_constructor import (CharsMode, CharsStrat, ChoicesStrat, ListStrat,
    StrategyConstructor, UntilStrat)
from shared.types import (Added, AdjustedLogits, AdjustedPrefill, Backtrack, EmitError, ForceOutput, ForceTokens,
    ForwardPass, ModAction, ModEvent, Noop, Prefilled, Sampled, ToolCalls)
from shared.utils import InvalidActionError, validate_action
from shared.conversation import get_conversation, get_schemas, tool_call_pairs
from max.driver import Tensor
"""


class Arguments(unittest.TestCase):
    def test_invalid_arguments_of_mod_are_rejected(self):
        handler = thunder_mods.mod(workers=3, holdback=0, name="a-b.c_1")(lambda event, actions: None)
        declared = handler.__thunder_mod__
        self.assertEqual((declared["workers"], declared["holdback"], declared["name"]), (3, 0, "a-b.c_1"))
        for argument, message, values in (
            ("workers", "workers must be an integer of 1 or more", (0, True, "2")),
            ("holdback", "holdback must be an integer of 0 or more", (-1,)),
            ("name", "name must be a string", (5,)),
        ):
            for wrong in values:
                with self.assertRaisesRegex(ValueError, message):
                    thunder_mods.mod(**{argument: wrong})(lambda event, actions: None)

    def test_large_counts_and_names_for_uploads_are_accepted(self):
        handler = thunder_mods.mod(workers=2**40, holdback=2**64, name="my mod")(lambda event, actions: None)
        declared = handler.__thunder_mod__
        self.assertEqual((declared["workers"], declared["holdback"], declared["name"]), (2**31 - 1, 2**31 - 1, "my mod"))
        self.assertEqual(thunder_mods.mod(holdback=2.0)(handler).__thunder_mod__["holdback"], 2)


class Reads(unittest.TestCase):
    def test_tokens_are_not_read_after_the_call(self):
        context = thunder_mods.ContextInfo((), 1, lambda last: [1, 2, 3][-last:])
        self.assertEqual(context.last(2), [2, 3])
        read = thunder_mods.ContextInfo((), 1, lambda last: [1, 2, 3][-last:])
        kept = read.tokens
        for ended in (context, read):
            ended._end_call()
        self.assertEqual((kept, read.generated), ([1, 2, 3], [2, 3]))
        for late in (lambda: context.tokens, lambda: context.prompt, lambda: context.last(2)):
            with self.assertRaisesRegex(RuntimeError, "only be read during its call"):
                late()


class Names(unittest.TestCase):
    def test_names_of_quote_are_importable(self):
        known = {}
        exec(QUOTE, known)
        self.assertIs(known["mod"], thunder_mods.mod)
        self.assertIs(known["Backtrack"], thunder_mods.Backtrack)
        self.assertIs(known["ChoicesStrat"], thunder_mods.ChoicesStrat)

    def test_thunder_package_exports_same_names(self):
        for name in ("", ".flow", ".self_prompt", ".strategies", ".testing"):
            first, second = importlib.import_module("thunder" + name), importlib.import_module("thunder_mods" + name)
            for public in second.__all__:
                self.assertIs(getattr(first, public), getattr(second, public))

    def test_public_names_have_docstrings(self):
        for path in sorted((SDK / "thunder_mods").rglob("*.py")):
            name = ".".join(path.relative_to(SDK).with_suffix("").parts)
            module = importlib.import_module(name[: -len(".__init__")] if name.endswith("__init__") else name)
            self.assertTrue(module.__doc__, name)
        for name in thunder_mods.__all__:
            self.assertTrue(name == "ModCallable" or getattr(thunder_mods, name).__doc__, name)

    def test_import_is_fast_and_needs_only_standard_library(self):
        code = "import sys; before = set(sys.modules); import thunder_mods; print(sorted(set(sys.modules) - before))"
        out = subprocess.run(
            [sys.executable, "-I", "-B", "-c", "import sys; sys.path.insert(0, %r); %s" % (str(SDK), code)],
            stdout=subprocess.PIPE, check=True, universal_newlines=True,
        ).stdout  # fmt: skip
        self.assertNotIn("'numpy'", out)
        self.assertNotIn("'thunder_mods.testing'", out)


class Conversation(unittest.TestCase):
    MESSAGES = [
        {"role": "user", "content": [{"type": "text", "text": "Book"}, {"type": "text", "text": " it"}]},
        {"role": "assistant", "content": None, "tool_calls": [tool_call("book", {"at": "ö"}, id="1"), tool_call("ask", id="2")]},
        {"role": "tool", "tool_call_id": "1", "content": "booked"},
    ]

    def test_tool_call_pairs_and_last_message(self):
        (first, result), (second, nothing) = tool_call_pairs(self.MESSAGES)
        self.assertEqual((first["function"]["name"], result, second["id"], nothing), ("book", "booked", "2", None))
        self.assertEqual(json.loads(first["function"]["arguments"]), {"at": "ö"})
        self.assertEqual(last_message(messages=self.MESSAGES)["content"], "booked")
        self.assertEqual(text_of(last_message("user", self.MESSAGES)), "Book it")
        self.assertIsNone(last_message("system", self.MESSAGES))
        self.assertNotEqual(tool_call("a")["id"], tool_call("a")["id"])

    def test_access_outside_of_run_raises_permission_error(self):
        self.assertEqual((thunder_mods.get_conversation(), thunder_mods.get_schemas()), ([], []))
        with self.assertRaises(PermissionError):
            thunder_mods.get_conversation("another")


class Numbers(unittest.TestCase):
    def test_top_k_accepts_all_kinds_of_logits(self):
        row = [0.0, 3.0, -1.0, 2.0]
        for logits in (Logits(memoryview(flat(row))), [row], row, thunder_mods.Tensor.from_numpy([row])):
            logprobs, tokens = top_k_logprob(logits, 2)
            self.assertEqual([int(token) for token in tokens[0]], [1, 3])
            self.assertAlmostEqual(float(logprobs[0][0]), -0.362, places=2)
        self.assertEqual(thunder_mods.AdjustedLogits(row).top_k_logprob(1)[1][0][0], 1)
        event = thunder_mods.ForwardPass("r", 1, Logits(memoryview(flat(row))))
        for edit, best in (({"set": {1: -9.0}}, 3), ({"add": {0: 9.0}}, 0), ({"token_temp": 0.5}, 1)):
            action = thunder_mods.for_event(event).adjust_logits(**edit)
            self.assertEqual(int(action.top_k_logprob(1)[1][0][0]), best)
        self.assertEqual(event.logits.tolist(), [row], "reading changes nothing")

    def test_keep_only_masks_other_logits(self):
        logits = Logits(memoryview(flat([1.0, 2.0, 3.0])))
        logits.keep_only([1])
        self.assertEqual(logits.tolist(), [[float("-inf"), 2.0, float("-inf")]])

    def with_and_without_numpy(self):
        """Yields once with numpy, if it is installed, and once without."""
        for module in filter(None, [numpy(), "none"]):
            with self.subTest(numpy=module), mock.patch.object(thunder_mods.logits, "_numpy", False if module == "none" else module):
                yield

    def test_keep_only_accepts_any_iterable(self):
        for _ in self.with_and_without_numpy():
            for tokens in ({0, 2}, [2, 0], (0, 2, 2), array("i", [0, 2]), (token for token in (0, 2)), {0: "", 2: ""}, range(0, 3, 2), [[0, 2]]):
                logits = Logits(memoryview(flat([1.0, 2.0, 3.0])))
                logits.keep_only(tokens, -9.0)
                self.assertEqual(logits.tolist(), [[1.0, -9.0, 3.0]], tokens)
            logits.keep_only([], -8.0)
            self.assertEqual(logits.tolist(), [[-8.0] * 3])

    def test_keep_only_rejects_other_ids(self):
        for _ in self.with_and_without_numpy():
            logits = Logits(memoryview(flat([1.0, 2.0, 3.0])))
            for tokens, error in (([-1], IndexError), ([0, 3], IndexError), ([2**70], IndexError), ([1.0], TypeError), ("ab", TypeError), ([[0], [1, 2]], TypeError)):
                with self.assertRaises(error):
                    logits.keep_only(tokens)
            with self.assertRaisesRegex(IndexError, "token 3 is not in the vocabulary; ids must be from 0 to 2"):
                logits.keep_only({3})
            self.assertEqual((logits.tolist(), logits.maybe_written), ([[1.0, 2.0, 3.0]], False))

    def test_top_k_is_limited_to_vocabulary(self):
        for _ in self.with_and_without_numpy():
            for count, expected in ((-1, []), (0, []), (1, [2]), (9, [2, 1, 0])):
                logprobs, tokens = top_k_logprob([1.0, 2.0, 3.0], count)
                self.assertEqual((len(logprobs[0]), [int(token) for token in tokens[0]]), (len(expected), expected))


class Actions(unittest.TestCase):
    def test_max_steps_must_be_a_token_count(self):
        event = thunder_mods.Prefilled("r", 0, 8)
        worker = Worker(mock.Mock(), mock.Mock(), "")
        valid = [(None, None), (0, None), (7, 7), (2**31 - 1, 2**31 - 1)]
        np = numpy()
        if np is not None:
            valid.append((np.int64(5), 5))
        for steps, encoded in valid:
            action = thunder_mods.AdjustedPrefill([1], steps)
            wire, _ = worker._encode_action(action, event)
            self.assertEqual(json.loads(json.dumps(wire)), {"type": "AdjustedPrefill", "tokens": [1], "max_steps": encoded})
            self.assertIsNone(action_error(action, 9, 9))
            thunder_mods.for_event(event).adjust_prefill([1], max_steps=steps)
        for limit in ({"max_steps": 7.5}, {"max_tokens": 7}):
            self.assertEqual(thunder_mods.for_event(event).adjust_prefill([1], **limit).max_steps, 7)
        with self.assertRaisesRegex(thunder_mods.InvalidActionError, "either max_tokens or max_steps, not both"):
            thunder_mods.for_event(event).adjust_prefill([1], max_tokens=7, max_steps=7)
        with self.assertRaisesRegex(thunder_mods.InvalidActionError, "`max_tokens` must be None or an integer"):
            thunder_mods.for_event(event).adjust_prefill([1], max_tokens=-1)
        self.assertEqual(event.max_tokens, 8)
        for steps in (-1, 2**31, 2**40, True, "5", float("inf")):
            message = "`max_steps` must be None or an integer from 0 to 2147483647, got %r" % (steps,)
            action = thunder_mods.AdjustedPrefill([1], steps)
            for send in (
                lambda: worker._encode_action(action, event),
                lambda: thunder_mods.for_event(event).adjust_prefill([1], max_steps=steps),
            ):
                with self.assertRaises(thunder_mods.InvalidActionError) as raised:
                    send()
                self.assertEqual(str(raised.exception), message)
            self.assertEqual(action_error(action, 9, 9), message)

    def test_tool_calls_have_limited_depth(self):
        event = thunder_mods.Prefilled("r", 0, 8)
        worker = Worker(mock.Mock(), mock.Mock(), "")

        def nested(depth):
            value = 1
            for _ in range(depth - 1):
                value = [value]
            return {"name": "f", "arguments": value}

        wire, _ = worker._encode_action(thunder_mods.ToolCalls(nested(100)), event)
        self.assertEqual(wire["type"], "ToolCalls")
        self.assertIsNone(action_error(thunder_mods.ToolCalls(nested(100)), 9, 9))
        cyclic = []
        cyclic.append([cyclic, cyclic])
        for payload in (nested(101), cyclic):
            message = "tool calls must not be nested more than 100 levels deep"
            for send in (
                lambda: worker._encode_action(thunder_mods.ToolCalls(payload), event),
                lambda: thunder_mods.for_event(event).tool_calls(payload),
            ):
                with self.assertRaisesRegex(thunder_mods.InvalidActionError, message):
                    send()
            self.assertEqual(action_error(thunder_mods.ToolCalls(payload), 9, 9), message)


class Serialization(unittest.TestCase):
    def serialized(self, files, module, name):
        with tempfile.TemporaryDirectory() as folder:
            for path, text in files.items():
                file = pathlib.Path(folder, path)
                file.parent.mkdir(exist_ok=True)
                file.write_text(textwrap.dedent(text))
            sys.path.insert(0, folder)
            try:
                found = getattr(importlib.import_module(module), name)
                return serialize_mod(found, name="n", description="d")
            finally:
                sys.path.remove(folder)
                for loaded in [name for name in sys.modules if name.partition(".")[0] == module.partition(".")[0]]:
                    del sys.modules[loaded]

    def test_module_is_serialized(self):
        source = "from thunder_mods import mod\n@mod\ndef calm(event, actions):\n    pass\n"
        self.assertEqual(
            self.serialized({"calm_mod.py": source}, "calm_mod", "calm"),
            {"language": "python", "module": "calm_mod", "entrypoint": "calm", "source": source, "name": "n", "description": "d"},
        )

    def test_created_mod_belongs_to_calling_module(self):
        source = "from thunder_mods import *\nsure = self_prompt_mod(prompt='?', strategy=ChoicesStrat(['a']))\n"
        payload = self.serialized({"sure_mod.py": source}, "sure_mod", "sure")
        self.assertEqual((payload["module"], payload["entrypoint"], payload["source"]), ("sure_mod", "sure", source))

    def test_package_includes_all_files(self):
        files = {
            "pack/__init__.py": "",
            "pack/words.py": "WORD = 'x'\n",
            "pack/main.py": "from thunder_mods import mod\nfrom .words import WORD\n@mod\ndef go(event):\n    pass\n",
        }
        payload = self.serialized(files, "pack.main", "go")
        self.assertEqual((payload["source"], payload["module"]), (files, "pack.main"))

    def test_mod_without_source_raises_value_error(self):
        with self.assertRaisesRegex(ValueError, "source"):
            exec("from thunder_mods import mod\n@mod\ndef go(event):\n    pass\n", {"__name__": "nowhere"}, self.__dict__)
            serialize_mod(self.go)


class Packaging(unittest.TestCase):
    def test_package_has_py_typed(self):
        self.assertTrue((SDK / "thunder_mods/py.typed").is_file())
        text = (SDK / "pyproject.toml").read_text()
        for package in next(os.walk(SDK))[1]:
            if package != "max" and not package.startswith((".", "_")):
                self.assertIn('"%s"' % package, text)


if __name__ == "__main__":
    unittest.main()
