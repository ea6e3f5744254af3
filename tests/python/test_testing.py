"""The testing engine behaves like the engine: order of events, and effect of each action at each event."""

import logging
import unittest

import thunder_mods.testing
from thunder_mods import (
    Added,
    AdjustedLogits,
    Backtrack,
    ForceTokens,
    ForwardPass,
    InvalidActionError,
    Prefilled,
    Sampled,
    mod,
    tokenize,
)
from thunder_mods.testing import Engine, RandomWeights, Scripted, WordTokenizer, run

logger = logging.getLogger(__name__)


def at(kind, act, times=1):
    """Creates a mod that replies to the first events of a kind."""
    left = [times]

    @mod(events=[kind])
    def once(event, actions, tokenizer):
        if left[0]:
            left[0] -= 1
            return act(event, actions, tokenizer)

    return once


def event_lines(result):
    return ["%s %d %r%s" % (event.kind, event.step, event.text, " forced" * event.forced) for event in result.events]


class Order(unittest.TestCase):
    def test_plain_run_emits_events_in_order(self):
        result = run([], prompt="Hi", model="yes!")
        self.assertEqual(
            event_lines(result),
            [
                "Prefilled 0 'Hi'",
                "ForwardPass 1 ''",
                "Sampled 1 'yes'",
                "Added 1 'yes'",
                "ForwardPass 2 ''",
                "Sampled 2 '!'",
                "Added 2 '!'",
                "ForwardPass 3 ''",
                "Sampled 3 '<eos>'",
                "Added 3 '<eos>'",
            ],
        )
        self.assertEqual([event.order for event in result.events], list(range(10)))
        self.assertEqual([event.position for event in result.events][:7], [0, 2, 2, 2, 3, 3, 3])
        self.assertEqual((result.text, result.finish_reason, result.sent), ("yes!", "stop", ["yes", "!"]))

    def test_forced_step_has_only_added_event(self):
        result = run(at("ForwardPass", lambda e, a, t: a.force_tokens(t.encode("yes, no"))), model="abc")
        self.assertEqual(event_lines(result)[1:4], ["ForwardPass 1 ''", "Added 1 'yes, no' forced", "ForwardPass 2 ''"])

    def test_force_at_sampled_drops_draw_and_at_added_keeps_it(self):
        at_sampled = run(at("Sampled", lambda e, a, t: a.force_tokens([88])), model=lambda tokens: {65: 9}, max_tokens=3)
        self.assertEqual(at_sampled.text, "XAA")
        self.assertEqual(event_lines(at_sampled)[3], "Added 1 'X' forced")
        at_added = run(at("Added", lambda e, a, t: a.force_tokens([88])), model=lambda tokens: {65: 9}, max_tokens=3)
        self.assertEqual(at_added.text, "AXA")
        self.assertEqual(event_lines(at_added)[4], "Added 2 'X' forced")


class Backtracking(unittest.TestCase):
    ABC = staticmethod(lambda tokens: {65 + len(tokens) % 26: 9})

    def back(self, kind, n, tokens=None, after=3, **options):
        @mod(events=[kind])
        def step(event, actions, tokenizer):
            if event.step == after:
                return actions.backtrack(n, tokens)

        return run(step, prompt="12", model=self.ABC, max_tokens=5, **options).check()

    def test_backtrack_at_sampled_draws_again(self):
        result = self.back("Sampled", 1)
        self.assertEqual((result.text, result.calls[2].removed), ("CDEFG", 0))
        self.assertEqual(event_lines(result)[8:10], ["Sampled 3 'E'", "ForwardPass 4 ''"])

    def test_backtrack_at_added_removes_token(self):
        result = self.back("Added", 1, [88])
        self.assertEqual(result.text, "CDXFG")
        self.assertEqual([event.step for event in result.events if event.kind == "Added"], [1, 2, 3, 4, 5, 6])

    def test_backtrack_at_forward_pass_counts_appended_tokens(self):
        self.assertEqual(self.back("ForwardPass", 2, [88, 89, 90]).text, "XYZFG")

    def test_backtrack_is_clamped_at_prompt(self):
        result = self.back("Added", 99)
        (call,) = [call for call in result.calls if isinstance(call.action, Backtrack)]
        self.assertEqual((call.removed, call.clamped, result.text), (3, True, "CDEFG"))
        self.assertEqual(result.prompt_tokens, [49, 50])

    def test_sent_text_is_retracted_unless_held_back(self):
        self.assertEqual(self.back("Added", 2).sent, ["C", "D", 1, "D", "E", "F", "G"])

        @mod(events=[Added], holdback=2)
        def careful(event, actions, tokenizer):
            return actions.backtrack(2) if event.step == 3 else None

        result = run(careful, prompt="12", model=self.ABC, max_tokens=5).check()
        self.assertFalse([item for item in result.sent if isinstance(item, int)])
        self.assertEqual(result.seen(), result.text)

        @mod(events=[Added])
        def prints(event, actions, tokenizer):
            event.hold_back(2 if event.step < 4 else None)
            return actions.backtrack(2) if event.step == 3 else None

        self.assertEqual(run(prints, prompt="12", model=self.ABC, max_tokens=5).check().sent, ["CD", "E", "F", "G"])

    def test_sent_tokens_are_not_discarded(self):
        @mod(events=[Added])
        def late(event, actions, tokenizer):
            if event.step >= 3:
                event.hold_back(9, discard=True)

        result = run(late, prompt="12", model=self.ABC, max_tokens=5).check()
        self.assertEqual((result.text, result.seen()), ("CD", "CD"))

    def test_discarded_tokens_are_not_sent(self):
        @mod(events=[ForwardPass], holdback=1)
        def announces(event, actions, tokenizer):
            count = len(event.context_info.tokens) - event.context_info.prompt_len - 2
            if count > 0:
                event.hold_back(count, discard=True)

        result = run(announces, prompt="12", model=self.ABC, max_tokens=5).check()
        self.assertEqual((result.text, result.sent), ("CD", ["C", "D"]))

    def test_announcement_ends_with_the_removal_or_the_next_added_event(self):
        for held_back, removed, text in ((1, 1, "CDEFG"), (2, 1, "CDEFG"), (-1, 1, "CDEFG"), (None, 1, "CDEFG")):

            @mod(events=[Added], holdback=9)
            def announces(event, actions, tokenizer):
                if event.step == 2:
                    event.hold_back(held_back, discard=True)
                    return actions.backtrack(removed)

            self.assertEqual(run(announces, prompt="12", model=self.ABC, max_tokens=5).check().text, text)

    def test_chain_of_forced_tokens_ends_at_the_limits(self):
        def again(event, actions, tokenizer):
            return actions.force_tokens([ord("x")])

        result = run(at("Added", again, times=10**6), model="abc", max_tokens=3000, max_steps=10**6).check()
        self.assertEqual((len(result.tokens), result.finish_reason), (3000, "length"))
        result = run(at("Added", again, times=10**6), model="abc", max_tokens=3000, max_steps=50).check()
        self.assertEqual((len(result.tokens), result.finish_reason), (50, "length"))
        self.assertIn("limit of 50 steps", result.message)

    def test_endless_backtracking_reaches_step_limit(self):
        result = run(at("Added", lambda e, a, t: a.backtrack(1), times=10**6), model="abc", max_tokens=4, max_steps=50)
        self.assertEqual((result.finish_reason, result.text), ("length", ""))
        self.assertIn("limit of 50 steps", result.message)


class Ends(unittest.TestCase):
    def test_force_output_replaces_answer_at_any_event(self):
        for kind in ("Prefilled", "ForwardPass", "Sampled", "Added"):
            result = run(at(kind, lambda e, a, t: a.force_output(t.encode("Done"))), model="abc").check()
            self.assertEqual((result.text, result.finish_reason), ("Done", "stop"), kind)
            self.assertEqual((result.events[-1].kind, result.events[-1].forced), ("Added", True))

    def test_tool_calls_and_errors_end_run(self):
        call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        for payload in (call, [call], {"role": "assistant", "tool_calls": [call]}):
            result = run(at("Added", lambda e, a, t: a.tool_calls(payload)), model="abc").check()
            self.assertEqual((result.finish_reason, result.tool_calls), ("tool_calls", [call]))
        result = run(at("Prefilled", lambda e, a, t: a.emit_error("no")), model="abc").check()
        self.assertEqual((result.finish_reason, result.message, result.tokens), ("error", "no", []))

    def test_errors_discard_text_that_was_not_sent_and_tool_calls_all_text(self):
        call = {"function": {"name": "now", "arguments": "{}"}}
        for act, retracts in ((lambda e, a, t: a.tool_calls(call), True), (lambda e, a, t: a.emit_error("no"), False)):
            for holdback, sent in ((0, "ab"), (1, "a"), (9, "")):

                @mod(events=[Added], holdback=holdback)
                def ends(event, actions, tokenizer):
                    return act(event, actions, tokenizer) if event.step == 3 else None

                result = run(ends, model="abcdef").check()
                text = "" if retracts else sent
                self.assertEqual((result.seen(), result.text), (text, text))
                self.assertEqual(result.sent, [*sent, len(sent)] if retracts and sent else [*sent])

    def test_end_token_in_forced_list_ends_run(self):
        result = run(at("Added", lambda e, a, t: a.force_tokens([66, t.eos_token_id, 67])), model="aaa").check()
        self.assertEqual((result.text, result.finish_reason), ("aB", "stop"))

    def test_limits_count_forced_tokens(self):
        result = run(at("ForwardPass", lambda e, a, t: a.force_tokens([65] * 9)), model="abc", max_tokens=4)
        self.assertEqual((result.text, result.finish_reason), ("AAAA", "length"))

    def test_stop_string_across_tokens_ends_run(self):
        result = run([], model="ab no. More", stop=[". M"])
        self.assertEqual((result.text, result.seen(), result.finish_reason), ("ab no", "ab no", "stop"))
        self.assertEqual(run([], model="abc", stop=["b"], ignore_eos=True).text, "a")


class HiddenStates(unittest.TestCase):
    def test_declared_layers_have_the_states_of_the_function(self):
        seen = []

        @mod(events=ForwardPass, hidden_states=[0, -1, 0])
        def read(event, actions):
            seen.append((list(event.hidden_state(-1)), list(event.hidden_state(0))))
            with self.assertRaisesRegex(ValueError, r"layer 5 is not declared; declare it with @mod\(hidden_states=\[5\]\)"):
                event.hidden_state(5)

        result = run(read, [1, 2, 3], model="ab", hidden_states=lambda tokens, layer: [len(tokens), layer])
        self.assertEqual(seen[:2], [([3.0, -1.0], [3.0, 0.0]), ([4.0, -1.0], [4.0, 0.0])])
        self.assertFalse([call.exception for call in result.calls if call.exception])

    def test_step_without_states_raises_runtime_error(self):
        @mod(events=ForwardPass, hidden_states=7)
        def read(event, actions):
            event.hidden_state(7)

        call = run(read, model="ab").calls[0]
        self.assertRegex(str(call.exception), "this step has no hidden states")

    def test_invalid_layers_are_rejected(self):
        for layers in (True, "3", [1.5], [512], [-513]):
            with self.subTest(layers), self.assertRaisesRegex(ValueError, "hidden_states must be layer numbers"):
                mod(hidden_states=layers)(lambda event, actions: None)


class Prompts(unittest.TestCase):
    def test_replaced_prompt_is_used(self):
        second = []

        @mod(events=[Prefilled])
        def look(event, actions, tokenizer):
            second.append((event.prompt_text, event.prompt_length, event.max_steps))

        first = at("Prefilled", lambda e, a, t: a.adjust_prefill(t.encode("New"), max_steps=2))
        result = run([first, look], model="abc").check()
        self.assertEqual((result.text, second), ("ab", [("New", 3, 2)]))
        self.assertEqual(result.prompt_tokens, WordTokenizer().encode("New"))

    def test_larger_limit_of_tokens_has_more_steps(self):
        raises = at("Prefilled", lambda e, a, t: a.adjust_prefill(e.context_info.tokens, max_steps=300), times=2)
        self.assertEqual(len(run(raises, model="x" * 400, max_tokens=4).check().text), 300)
        result = run(raises, model="x" * 400, max_tokens=4, max_steps=9)
        self.assertEqual((len(result.text), result.finish_reason), (9, "length"), "the test's own limit")


class Pipeline(unittest.TestCase):
    def test_first_mod_decides_and_others_are_called(self):
        first = at("Added", lambda e, a, t: a.force_tokens([49]))
        second = at("Added", lambda e, a, t: a.force_tokens([50]))
        result = run([first, second], model="abc").check()
        self.assertEqual([call.superseded for call in result.calls[:2]], [False, True])
        self.assertTrue(result.text.startswith("a1"))

    def test_each_mod_sees_logits_of_previous_mod(self):
        ban = at("ForwardPass", lambda e, a, t: a.adjust_logits(set={65: float("-inf")}), times=99)
        seen = []

        @mod(events=["ForwardPass"])
        def look(event, actions, tokenizer):
            seen.append(event.top_k_logprob(1)[1][0][0])

        result = run([ban, look], model=lambda tokens: {65: 9, 66: 8}, max_tokens=2).check()
        self.assertEqual((result.text, seen), ("BB", [66, 66]))
        self.assertEqual(result.calls[0].logits[65], float("-inf"))

    def test_in_place_full_and_sparse_edits_apply(self):
        def in_place(event, actions, tokenizer):
            event.logits[67] = 50.0
            return actions.adjust_logits()

        def whole(event, actions, tokenizer):
            return actions.adjust_logits([[50.0 if token == 67 else 0.0 for token in range(len(tokenizer))]])

        for act in (in_place, whole, lambda e, a, t: a.adjust_logits(add={67: 50.0})):
            self.assertEqual(run(at("ForwardPass", act, times=9), model="ab", max_tokens=2).check().text, "CC")

        def edited_without_action(event, actions, tokenizer):
            event.logits[67] = 50.0

        self.assertEqual(run(at("ForwardPass", edited_without_action, times=9), model="ab").check().text, "ab")

    def test_token_temp_applies_to_one_draw(self):
        flat = lambda tokens: [0.0] * len(WordTokenizer())  # noqa: E731
        drawn = {run([], model=flat, max_tokens=3, temperature=1.0, seed=seed).tokens[0] for seed in range(9)}
        self.assertGreater(len(drawn), 1)
        cold = at("ForwardPass", lambda e, a, t: a.adjust_logits(token_temp=0), times=99)
        drawn = {run(cold, model=flat, max_tokens=3, temperature=1.0, seed=seed).tokens[0] for seed in range(9)}
        self.assertEqual(drawn, {0})

    def test_runs_repeat_with_same_seed(self):
        texts = [run([], model=RandomWeights(1), temperature=1.0, seed=seed).text for seed in (1, 1, 2)]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])


class InvalidActions(unittest.TestCase):
    def test_action_not_permitted_at_event_is_reported(self):
        for kind, act in [
            ("Prefilled", lambda e, a, t: a.force_tokens([1])),
            ("Prefilled", lambda e, a, t: ForceTokens([1])),
            ("Prefilled", lambda e, a, t: a.backtrack(1)),
            ("Prefilled", lambda e, a, t: a.adjust_logits()),
            ("ForwardPass", lambda e, a, t: a.adjust_prefill([1])),
            ("Sampled", lambda e, a, t: a.adjust_prefill([1])),
            ("Sampled", lambda e, a, t: a.adjust_logits(set={1: 0})),
            ("Added", lambda e, a, t: AdjustedLogits(set={1: 0})),
            ("Added", lambda e, a, t: a.adjust_prefill([1])),
            ("Added", lambda e, a, t: a.force_output("text")),
            ("Added", lambda e, a, t: a.force_tokens([10**6])),
            ("Added", lambda e, a, t: a.force_tokens([])),
            ("Added", lambda e, a, t: a.backtrack(0)),
            ("Added", lambda e, a, t: 3),
            ("ForwardPass", lambda e, a, t: a.adjust_logits(token_temp=-1)),
            ("ForwardPass", lambda e, a, t: a.adjust_logits(set={1: float("nan")})),
            ("ForwardPass", lambda e, a, t: a.adjust_logits([0.0] * 3)),
            ("ForwardPass", lambda e, a, t: a.adjust_logits(set=dict.fromkeys(range(len(t)), float("-inf")))),
        ]:
            result = run(at(kind, act), model="abc")
            (error,) = result.exceptions()
            self.assertIsInstance(error, InvalidActionError, (kind, error))
            self.assertEqual(result.text, "abc", "the action counts as Noop")
            with self.assertRaises(InvalidActionError):
                result.check()

    def test_exception_is_recorded_and_run_continues(self):
        result = run(at("Added", lambda e, a, t: 1 / 0), model="abc")
        self.assertIsInstance(result.exceptions()[0], ZeroDivisionError)
        self.assertEqual(result.text, "abc")

    def test_invalid_configuration_raises_value_error(self):
        @mod(config={"a": 1})
        def has(event, actions):
            print(event.config)

        self.assertEqual(run((has, {"a": 2}), model="x", max_tokens=1).check().logs()[0], "{'a': 2}")
        with self.assertRaisesRegex(ValueError, "unknown configuration field b"):
            run(has, model="x", config={"b": 1})


class Calls(unittest.TestCase):
    def test_logs_conversation_and_tokenizer_are_available(self):
        @mod(events=[Added])
        def prints(event, actions, tokenizer):
            print("printed", thunder_mods.get_conversation()[0]["content"], tokenize("yes"))
            logger.warning("logged %d", event.step)

        result = run(prints, model="ab", conversation=[{"role": "user", "content": "Hi"}])
        yes = WordTokenizer().encode("yes")
        self.assertEqual(result.check().logs()[:2], ["printed Hi %s" % yes, "logged 1"])
        self.assertEqual(result.calls[0].logs, [("INFO", "printed Hi %s" % yes), ("WARNING", "logged 1")])

    def test_events_have_all_fields(self):
        seen = []

        @mod
        def look(event, actions, tokenizer):
            if isinstance(event, ForwardPass):
                seen.append((event.input_text, event.logits.shape, event.context_info.prompt_len))
            if isinstance(event, Sampled):
                seen.append((event.text, round(event.logprob, 3)))
            if isinstance(event, Added):
                seen.append((event.added_tokens, event.forced, event.context_info.generated, event.input_ids[-1]))

        run(look, prompt="Hello", model=lambda tokens: {65: 30.0}, max_tokens=1).check()
        size = len(WordTokenizer())
        self.assertEqual(seen, [("Hello", (1, size), 1), ("A", 0.0), ([65], False, [65], 65)])

    def test_plain_function_is_accepted_as_mod(self):
        def shout(event, actions, tokenizer):
            return actions.force_output(tokenizer.encode("!")) if isinstance(event, Prefilled) else None

        self.assertEqual(run(shout, model="a").check().text, "!")

    def test_finished_hook_is_called(self):
        ended.clear()
        Engine(Scripted("a")).run(at("Added", lambda e, a, t: None), request_id="r1")
        self.assertEqual(ended, ["r1"])


ended = []


def finished(request_id):
    ended.append(request_id)


class Vocabulary(unittest.TestCase):
    def test_encoding_and_decoding(self):
        tokenizer = WordTokenizer()
        for text in ("Hello world", "größer 日本", "yes, no", ""):
            self.assertEqual(tokenizer.decode(tokenizer.encode(text)), text)
        self.assertEqual(tokenizer.encode("a", add_special_tokens=True), [tokenizer.bos_token_id, 97])
        self.assertEqual(tokenizer.decode([97, tokenizer.eos_token_id], skip_special_tokens=True), "a")
        self.assertEqual(tokenizer.convert_ids_to_tokens([97, tokenizer.eos_token_id]), ["a", "<eos>"])
        self.assertEqual(tokenizer.get_vocab()["yes"], tokenizer.convert_tokens_to_ids("yes"))


if __name__ == "__main__":
    unittest.main()
