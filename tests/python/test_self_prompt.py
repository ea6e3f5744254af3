"""Hidden questions: the remaining text, the text seen by a client, and interference by other mods."""

import unittest

import quote_mod_sdk
from quote_mod_sdk.self_prompt import EraseMode, SelfPrompt
from quote_mod_sdk.strategies.strategy_constructor import ChoicesStrat, ListStrat
from thunder_mods import Added, AdjustedLogits, ContextInfo, ForwardPass, Prefilled, UntilStrat, mod, self_prompt_mod
from thunder_mods.testing import Engine, RandomWeights, Scripted, WordTokenizer, run

YES_NO = ChoicesStrat(["yes", "no"])
MODEL = Scripted("Hello world", {"(yes/no): ": "no"})


def ask(**options):
    got = []
    options.setdefault("strategy", YES_NO)
    options.setdefault("prompt", " Sure (yes/no): ")
    question = self_prompt_mod(on_answer=lambda _, answer: got.append(answer), **options)
    question.got = got
    return question


class Erasing(unittest.TestCase):
    def test_erase_modes_remove_expected_text(self):
        for erase, text in [
            ("all", "Hello world"),
            ("prompt", "no world"),
            (EraseMode.NONE, " Sure (yes/no): no"),
            (None, " Sure (yes/no): no"),
        ]:
            asked = ask(erase=erase)
            result = run(asked, model=MODEL).check()
            self.assertEqual((result.text, asked.got), (text, ["no"]), erase)
            self.assertEqual(result.seen(), text)
            self.assertFalse([item for item in result.sent if isinstance(item, int)], "no sent text is retracted")

    def guarded(self, question):
        """Returns a mod that passes the question no more events once its answer is complete."""

        @mod
        def guarded(event, actions, tokenizer):
            if question.is_complete(event.request_id):
                return actions.noop()
            if isinstance(event, ForwardPass):
                return question.handle_forward_pass(event, actions, tokenizer)
            if isinstance(event, Added):
                return question.handle_added(event, actions, tokenizer)

        return guarded

    def test_answer_after_erased_question_is_kept(self):
        for stop, text in (([], "Hello world"), (["lo"], "Hel")):
            guarded = self.guarded(SelfPrompt(prompt=" Sure (yes/no): ", strategy=YES_NO, erase="all"))
            result = run(guarded, model=MODEL, stop=stop).check()
            self.assertEqual((result.text, result.seen(), result.finish_reason), (text, text, "stop"))

    def test_answer_that_begins_like_the_erased_prompt_is_kept(self):
        guarded = self.guarded(SelfPrompt(prompt="yes or no? ", strategy=YES_NO, erase="prompt"))
        result = run(guarded, model=Scripted("Hello world", {"yes or no? ": "yes"})).check()
        self.assertEqual((result.text, result.seen()), ("yes world", "yes world"))

    def test_text_is_kept_if_another_mod_wins_the_erasure(self):
        @mod(events=[Added])
        def wins(event, actions, tokenizer):
            if event.text.endswith("no"):
                return actions.force_tokens([ord("!")])

        guarded = self.guarded(SelfPrompt(prompt=" Sure (yes/no): ", strategy=YES_NO, erase="all"))
        result = run([wins, guarded], model=MODEL).check()
        self.assertTrue(result.text.startswith(" Sure (yes/no): no!"), result.text)

    def test_completion_follows_only_kept_answers(self):
        for completion in ("!\n", {"suffix": "!\n"}, [ord("!"), ord("\n")]):
            self.assertEqual(run(ask(completion=completion), model=MODEL).check().text, " Sure (yes/no): no!\n")
        self.assertEqual(run(ask(completion={"suffix": "!", "force": False}), model=MODEL).text, " Sure (yes/no): no")
        self.assertEqual(run(ask(completion="!", erase="all"), model=MODEL).check().text, "Hello world")

    def test_prompt_can_be_tokens_or_none(self):
        for prompt in ([ord("?")], {"tokens": [ord("?")]}, {"text": "?"}, "?"):
            question = self_prompt_mod(prompt=prompt, strategy=YES_NO)
            self.assertRegex(run(question, model=RandomWeights(1), max_tokens=12).check().text, r"^\?(yes|no)")
        question = self_prompt_mod(strategy=YES_NO)
        self.assertRegex(run(question, model=RandomWeights(1), max_tokens=12).check().text, r"^(yes|no)")

    def test_argmax_takes_most_probable_allowed_token(self):
        for seed in range(5):
            question = ask(erase="all", argmax_sampling=True)
            first = run(question, model=RandomWeights(3), temperature=1.0, seed=seed).check()
            self.assertTrue(any(action.token_temp == 0 for action in first.actions("AdjustedLogits")))
            self.assertEqual(question.got[0], ask_once(question))

    def test_end_token_of_shorter_choice_is_not_in_answer(self):
        for erase, text in (("prompt", "no"), (None, " Sure (yes/no): no"), ("all", "........")):
            asked = ask(strategy=ChoicesStrat(["no", "no way"]), erase=erase)
            result = run(asked, model=EndsAfterNo(), max_tokens=24).check()
            self.assertEqual(asked.got, ["no"])
            self.assertEqual(result.text[: len(text)], text)
            self.assertEqual(result.finish_reason, "length", "the end token of the choice does not end the answer")


class EndsAfterNo:
    """A model that writes "no" and the end token after a question, and dots otherwise."""

    def __init__(self):
        self.ends = True

    def logits(self, tokens, prompt_len, tokenizer):
        text = tokenizer.decode(tokens)
        logits = [0.0] * len(tokenizer)
        if text.endswith("(yes/no): "):
            logits[tokenizer.encode("no")[0]] = 20.0
        elif text.endswith("(yes/no): no") and self.ends:
            self.ends = False
            logits[tokenizer.eos_token_id] = 20.0
        else:
            logits[ord(".")] = 20.0
        return logits


def ask_once(question):
    question.got.clear()
    run(question, model=RandomWeights(3), temperature=1.0, seed=99).check()
    return question.got[0]


class Interference(unittest.TestCase):
    def test_question_without_room_is_erased_and_has_no_answer(self):
        for max_tokens in (3, 20):
            asked = ask(strategy=UntilStrat("", "tag", "never comes"), erase="all")
            result = run(asked, model=RandomWeights(2), max_tokens=max_tokens, temperature=1.0).check()
            self.assertEqual(asked.got, [None])
            self.assertNotIn("Sure", result.seen())
            self.assertEqual(result.finish_reason, "length")

    def test_prompt_removed_by_another_mod_is_forced_again(self):
        taken = []

        @mod
        def interfere(event, actions, tokenizer):
            if isinstance(event, Added) and event.forced and not taken:
                taken.append(1)
                return actions.backtrack(2)

        asked = ask(erase="all")
        result = run([interfere, asked], model=MODEL).check()
        self.assertEqual((asked.got, taken), (["no"], [1]))
        self.assertIn("Hello", result.text)

    def test_tokens_forced_into_answer_by_another_mod_are_removed(self):
        forced = []

        @mod
        def interfere(event, actions, tokenizer):
            if isinstance(event, Added) and event.text.endswith(": ") and not forced:
                forced.append(1)
                return actions.force_tokens(tokenizer.encode("perhaps"))

        asked = ask(erase="all")
        self.assertEqual(run([interfere, asked], model=MODEL).check().text, "Hello world")
        self.assertEqual(asked.got, ["no"])

    def test_ban_of_all_allowed_tokens_is_reported(self):
        @mod
        def ban(event, actions, tokenizer):
            if isinstance(event, ForwardPass):
                return actions.adjust_logits(set=dict.fromkeys([ord("y"), ord("n")] + tokenizer.encode("yes") + tokenizer.encode("no"), float("-inf")))

        result = run([ban, ask(erase="all")], model=RandomWeights(1), max_tokens=40)
        self.assertIn("banned every token", str(result.exceptions()[0]))
        self.assertNotIn("Sure", result.text)


class Shift(unittest.TestCase):
    """A full context evicts tokens while a question is active."""

    def setUp(self):
        self.tokenizer = WordTokenizer()
        self.prompt = self.tokenizer.encode(" Sure: ")
        self.mod = ask(prompt=" Sure: ", strategy=UntilStrat("", "tag", "</a>"), erase="all")
        self.sequence, self.prompt_len, self.evicted = [ord("p"), ord("q")] + self.tokenizer.encode("before"), 2, 0
        self.evictions_end = 0

    def evict(self, start, end):
        of_prompt = max(0, self.prompt_len - start)
        del self.sequence[start:end]
        self.prompt_len -= of_prompt
        self.evicted += end - start - of_prompt
        self.evictions_end = max(end, self.evictions_end) - (end - start)

    def send(self, event, max_steps=1000):
        event.context_info = ContextInfo(list(self.sequence), self.prompt_len, None, self.evicted, self.evictions_end)
        event.max_steps = max_steps
        action = self.mod(event, self.tokenizer)
        return action, event._held_back

    def forward(self):
        return self.send(ForwardPass("r", 1, [0.0] * len(self.tokenizer)))[0]

    def added(self, text, max_steps=1000, forced=False):
        tokens = self.tokenizer.encode(text)
        self.sequence += tokens
        return self.send(Added("r", 1, tokens, forced), max_steps)

    def begin(self):
        self.assertEqual(self.forward().tokens, self.prompt)
        self.added(" Sure: ", forced=True)

    def test_question_continues_after_eviction_before_it(self):
        for start, end in ((2, 3), (1, 3), (0, 2)):
            self.setUp()
            before = len(self.sequence)
            self.begin()
            self.evict(start, end)
            self.assertIsInstance(self.forward(), AdjustedLogits, "the prompt is not forced again")
            _, held_back = self.added("x")
            self.assertEqual(held_back, len(self.prompt) + 1)
            action, _ = self.added("</a>")
            self.assertEqual(self.mod.got, ["x</a>"])
            self.assertEqual(len(self.sequence) - action.n, before - (end - start), "only the question is erased")

    def test_complete_question_is_erased_after_eviction(self):
        self.begin()
        before = len(self.sequence) - len(self.prompt)
        self.added("x</a>")
        self.evict(2, 3)
        self.assertEqual(len(self.sequence) - self.forward().n, before - 1)

    def test_question_continues_after_eviction_of_its_start(self):
        self.begin()
        self.added("x")
        start = len(self.sequence) - 1 - len(self.prompt)
        self.evict(2, start + 2)
        self.assertIsInstance(self.forward(), AdjustedLogits)
        action, held_back = self.added("</a>")
        self.assertEqual((self.mod.got, held_back), (["x</a>"], len(self.prompt) + 1 + len(self.tokenizer.encode("</a>"))))
        self.assertEqual(action.n, held_back)

    def test_question_continues_after_evictions_in_its_middle(self):
        self.begin()
        start = len(self.sequence) - len(self.prompt)
        self.added("xy")
        for size in (3, 1):
            self.evict(start + 2, start + 2 + size)
            self.assertIsInstance(self.forward(), AdjustedLogits, "the prompt is not forced again")
        _, held_back = self.added("</a>")
        length = len(self.prompt) + 2 + len(self.tokenizer.encode("</a>"))
        self.assertEqual((self.mod.got, held_back), (["xy</a>"], length))

    def test_question_continues_after_eviction_within_the_answer_before_it(self):
        before = len(self.sequence)
        self.begin()
        self.evict(4, 6)
        self.assertIsInstance(self.forward(), AdjustedLogits, "the prompt is not forced again")
        action, _ = self.added("x</a>")
        self.assertEqual(self.mod.got, ["x</a>"])
        self.assertEqual(len(self.sequence) - action.n, before - 2, "only the question is erased")

    def test_evicted_tokens_count_for_the_end_of_the_run(self):
        self.begin()
        self.evict(2, 3)
        maximum = len(self.sequence) - 2 + 1 + 1
        action, _ = self.added("x", max_steps=maximum)
        self.assertEqual((self.mod.got, action.n), ([None], len(self.prompt) + 1))


class QuoteUsage(unittest.TestCase):
    def test_mod_may_ignore_result_of_handle_added(self):
        prompt = {"text": " Choose (yes/no): "}
        question = SelfPrompt(prompt=prompt, strategy=YES_NO, erase=EraseMode.ALL, mask_value=-1e9)
        seen = []

        @quote_mod_sdk.mod
        def classify(event, actions, tokenizer):
            if isinstance(event, Prefilled):
                question.handle_prefilled(event, tokenizer)
            if isinstance(event, ForwardPass):
                return question.handle_forward_pass(event, actions, tokenizer)
            if isinstance(event, Added):
                question.handle_added(event, actions, tokenizer)
                if question.is_complete(event.request_id) and not seen:
                    seen.append(tokenizer.decode(question.answer_tokens(event.request_id)))
            return actions.noop()

        result = run(classify, model=MODEL).check()
        self.assertEqual((result.text, seen), ("Hello world", ["no"]))

    def test_state_is_removed_with_run(self):
        asked = ask(erase="all")
        engine = Engine(MODEL)
        for number in range(50):
            engine.run(asked, request_id="run %d" % number).check()
        self.assertEqual(asked.self_prompt._states, {})
        self.assertEqual(asked.got, ["no"] * 50)

    def test_choices_can_be_replaced(self):
        question = SelfPrompt(prompt="?", strategy=ChoicesStrat(["a"]), erase="prompt")
        question.refresh_responses(["b"])

        @mod
        def choose(event, actions, tokenizer):
            if isinstance(event, ForwardPass):
                return question.handle_forward_pass(event, actions, tokenizer)
            if isinstance(event, Added):
                return question.handle_added(event, actions, tokenizer)

        self.assertTrue(run(choose, model="c").check().text.startswith("b"))

    def test_choices_of_one_run_do_not_change_other_runs(self):
        shared = ChoicesStrat(["a"])
        for strategy, idx in ((shared, None), (ListStrat(shared, min=1, max=1), None), (ListStrat([shared]), 0)):
            question = SelfPrompt(prompt="?", strategy=strategy, erase="prompt")

            @mod
            def choose(event, actions, tokenizer):
                if isinstance(event, Prefilled) and event.request_id == "first":
                    question.refresh_responses(["b"], event.request_id, idx)
                if isinstance(event, ForwardPass):
                    return question.handle_forward_pass(event, actions, tokenizer)
                if isinstance(event, Added):
                    return question.handle_added(event, actions, tokenizer)

            engine = Engine("c")
            texts = [engine.run(choose, request_id=name).check().text[:1] for name in ("first", "second")]
            self.assertEqual(texts, ["b", "a"])
            self.assertEqual((question._states, question._strategies), ({}, {}))
        self.assertEqual(shared.choices, ["a"])


if __name__ == "__main__":
    unittest.main()
