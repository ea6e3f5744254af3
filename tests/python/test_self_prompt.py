"""Hidden questions: the remaining text, the text seen by a client, and interference by other mods."""

import unittest

import quote_mod_sdk
from quote_mod_sdk.self_prompt import EraseMode, SelfPrompt
from quote_mod_sdk.strategies.strategy_constructor import ChoicesStrat, ListStrat
from thunder_mods import Added, ForwardPass, Prefilled, UntilStrat, mod, self_prompt_mod
from thunder_mods.testing import Engine, RandomWeights, Scripted, run

YES_NO = ChoicesStrat(["yes", "no"])
MODEL = Scripted("Hello world", {"(yes/no): ": "no"})


def ask(**options):
    got = []
    options.setdefault("strategy", YES_NO)
    question = self_prompt_mod(prompt=" Sure (yes/no): ", on_answer=lambda _, answer: got.append(answer), **options)
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
