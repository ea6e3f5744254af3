"""Mistakes in mods that the SDK rejects or explains."""

import errno
import functools
import os
import unittest
from unittest import mock
from urllib.error import URLError

from thunder_mods import Added, ForwardPass, mod
from thunder_mods.actions import EmitError, InvalidActionError, for_event
from thunder_mods.worker.failure import describe_exception


class DecoratorTest(unittest.TestCase):
    def test_functions_that_cannot_be_called_are_rejected(self):
        def four(event, actions, tokenizer, run): ...

        def keyword(event, *, run): ...

        def generator(event, actions):
            yield actions.noop()

        for function, message in [
            (four, "requires the argument `run`"),
            (keyword, "requires the argument `run`"),
            (generator, "a mod cannot be a generator"),
        ]:
            with self.assertRaisesRegex(TypeError, message):
                mod(function)

    def test_optional_arguments_are_accepted(self):
        def more(event, actions, tokenizer, run=None, *, again=1):
            return tokenizer

        self.assertIsNotNone(mod(more))
        self.assertIsNotNone(mod(lambda *arguments: None))


    def test_wrappers_may_add_or_pass_on_arguments(self):
        def inject(function):
            @functools.wraps(function)
            def wrapper(event, actions, tokenizer):
                return function(event, actions, tokenizer, [tokenizer])

            return wrapper

        def pass_on(function):
            @functools.wraps(function)
            def wrapper(*args):
                return function(*args)

            return wrapper

        seen = []

        @mod
        @inject
        def injected(event, actions, tokenizer, state):
            seen.append(state)

        @mod
        @pass_on
        def two(event, actions):
            seen.append(actions)

        for function in (injected, two):
            function(Added("r", 1, [1], False), "tokenizer")
        self.assertEqual(seen[0], ["tokenizer"])
        self.assertEqual(len(seen), 2)


class CountTest(unittest.TestCase):
    def test_counts_must_be_integers(self):
        event = Added("r", 1, [1], False)
        for count in ("x", "1.5", 1.5, [1], float("inf")):
            with self.assertRaisesRegex(InvalidActionError, "`count` of hold_back must be an integer or None, got "):
                event.hold_back(count)
        for count, held_back in ((3 - 5, 0), (2.0, 2), ("2", 2), (True, 1)):
            event.hold_back(count)
            self.assertEqual(event._held_back, held_back)
        for count, steps in ((2.0, 2), ("2", 2), (True, 1)):
            self.assertEqual(for_event(event).backtrack(count).n, steps)
        for steps in (0, -1, "x", 1.5, None):
            with self.assertRaisesRegex(InvalidActionError, "`steps` of backtrack must be an integer of 1 or more, got "):
                for_event(event).backtrack(steps)
        event.hold_back(10**30)
        event.hold_back(None)
        self.assertEqual(for_event(event).backtrack(10**30).n, 10**30)


class MessageTest(unittest.TestCase):
    def test_error_without_text_has_a_message(self):
        event = ForwardPass("r", 1, None)
        for error in (for_event(event).emit_error(""), EmitError("")):
            self.assertEqual(error.err_str, "the mod ended the run without a message")

    def test_denied_operation_names_the_sandbox(self):
        denied = PermissionError(errno.EPERM, "Operation not permitted")
        missing = FileNotFoundError(errno.ENOENT, "No such file")
        with mock.patch.dict(os.environ, THUNDER_SANDBOX="1"):
            for error in (denied, URLError(denied)):
                self.assertIn("the sandbox of uploaded mods", describe_exception(error, "/sdk")["message"])
            self.assertNotIn("sandbox", describe_exception(missing, "/sdk")["message"])
        self.assertNotIn("sandbox", describe_exception(denied, "/sdk")["message"])


if __name__ == "__main__":
    unittest.main()
