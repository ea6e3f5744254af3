"""Constrained answers have their format with any model. The models have random logits."""

import json
import re
import unittest

from thunder_mods import CharsMode, CharsStrat, ChoicesStrat, ListStrat, UntilEndType, UntilStrat, self_prompt_mod
from thunder_mods.strategies.base import Strategy
from thunder_mods.strategies.masks import shared_automaton, token_pieces
from thunder_mods.testing import RandomWeights, Scripted, WordTokenizer, run

SEEDS = 10


def answers(strategy, seeds=SEEDS, max_tokens=160, **options):
    """Returns the answers of models with several seeds; None if the tokens were used up before the answer was complete."""
    found = []
    for seed in range(seeds):
        ask = self_prompt_mod(
            prompt=" Q: ", strategy=strategy, erase="all", on_answer=lambda _, answer: found.append(answer), **options
        )
        result = run(ask, model=RandomWeights(seed), temperature=1.0, seed=seed, max_tokens=max_tokens).check()
        assert " Q: " not in result.seen() and result.seen() == result.text
    return found


class Formats(unittest.TestCase):
    def matches(self, strategy, pattern, complete=SEEDS // 2):
        found = answers(strategy)
        self.assertEqual(len(found), SEEDS)
        kept = [answer for answer in found if answer is not None]
        self.assertGreaterEqual(len(kept), complete, "most answers are complete: %r" % found)
        for answer in kept:
            self.assertRegex(answer, re.compile(r"(?s)\A(?:%s)\Z" % pattern))
        return kept

    def test_choices(self):
        kept = self.matches(ChoicesStrat(["yes", "no", "maybe 10"]), "yes|no|maybe 10", complete=SEEDS)
        self.assertGreater(len(set(kept)), 1)

    def test_choice_that_is_prefix_of_another_can_end_or_continue(self):
        kept = self.matches(ChoicesStrat(["no", "no world", "no world is"]), "no( world( is)?)?", complete=SEEDS)
        self.assertGreater(len(set(kept)), 1)

    def test_choices_support_any_script(self):
        self.matches(ChoicesStrat(["größer", "größe", "日本", "日曜日"]), "größer?|日本|日曜日", complete=SEEDS)

    def test_until_tag_ends_at_tag(self):
        for answer in self.matches(UntilStrat("<q>", UntilEndType.TAG, "</q>"), "<q>.*</q>", complete=0):
            self.assertEqual(answer.count("</q>"), 1)

    def test_until_anychar_ends_at_any_character(self):
        self.matches(UntilStrat(None, UntilEndType.ANYCHAR, ".!?,;aeiou"), "[^.!?,;aeiou]*[.!?,;aeiou]")

    def test_number_of_digits_is_limited(self):
        self.matches(CharsStrat(CharsMode.NUMERIC, min=4, stop=4), "[0-9]{4}", complete=SEEDS)
        self.matches(CharsStrat("numeric", min=1, stop=3), "[0-9]{1,3}", complete=SEEDS)

    def test_alpha_accepts_letters_only(self):
        for answer in self.matches(CharsStrat(CharsMode.ALPHA, stop=5, min=2), r".{2,5}", complete=SEEDS):
            self.assertTrue(answer.isalpha(), answer)

    def test_stop_text_is_not_part_of_answer(self):
        for answer in self.matches(CharsStrat(CharsMode.ALPHANUMERIC, stop="; ", min=1, max=12), ".{1,12}", complete=SEEDS):
            self.assertTrue(answer.isalnum(), answer)

    def test_string_is_valid_between_quotes(self):
        for answer in self.matches(CharsStrat(CharsMode.STRING, stop='"', max=30), ".{0,30}", complete=SEEDS):
            self.assertIsNone(re.search(r'(?<!\\)(\\\\)*"', answer), answer)

    def test_float_is_valid_json(self):
        for answer in self.matches(CharsStrat(CharsMode.JS_FLOAT, stop="\n", max=10), ".{1,10}", complete=SEEDS):
            self.assertIsInstance(json.loads(answer), (int, float))

    def test_list_of_strings_is_valid_json(self):
        strings = CharsStrat(CharsMode.ALPHA, stop='"', max=6)
        kept = self.matches(
            ListStrat(strings, open="[", close="]", wrap='"', min=1, max=3), r'\[".*"\]', complete=SEEDS
        )
        for answer in kept:
            self.assertTrue(1 <= len(json.loads(answer)) <= 3, answer)
        self.assertGreater(len({len(json.loads(answer)) for answer in kept}), 1, "the model decides the number")

    def test_list_with_format_per_element(self):
        each = [ChoicesStrat(["a", "b"]), CharsStrat("numeric", stop=2, min=1), ChoicesStrat(["c", "cd"])]
        self.matches(ListStrat(each, open="<", close=">", sep="|", end_with="\n"), r"<[ab]\|[0-9]{1,2}\|cd?>\n", SEEDS)

    def test_list_without_close_ends_with_end_token(self):
        self.matches(ListStrat(ChoicesStrat(["x", "y"]), sep="; ", min=2, max=4), "[xy](; [xy]){1,3}", complete=SEEDS)

    def test_lists_can_be_nested(self):
        inner = ListStrat(CharsStrat("numeric", stop=1, min=1), open="[", close="]", max=2)
        for answer in self.matches(ListStrat(inner, open="[", close="]", min=1, max=2), r"\[.*\]", complete=SEEDS):
            self.assertIsInstance(json.loads(answer), list)

    def test_stop_shared_with_separator_is_written_once(self):
        numbers = CharsStrat("numeric", stop=",", min=1, max=3)
        self.matches(ListStrat(numbers, open="(", sep=", ", min=2, max=2, close=",)"), r"\(\d{1,3}, \d{1,3},\)", SEEDS)


class Preferences(unittest.TestCase):
    def answer(self, strategy, wanted):
        return self.ask(strategy, wanted)[0]

    def ask(self, strategy, wanted, **options):
        got = []
        question = self_prompt_mod(prompt=" Q: ", strategy=strategy, erase="all", on_answer=lambda _, a: got.append(a))
        result = run(question, model=Scripted("Hello", {" Q: ": wanted}), **options).check()
        return got[0], result

    def test_allowed_tokens_of_model_are_kept(self):
        self.assertEqual(self.answer(ChoicesStrat(["no", "no world"]), "no"), "no")
        self.assertEqual(self.answer(ChoicesStrat(["no", "no world"]), "no world"), "no world")
        self.assertEqual(self.answer(UntilStrat("<q>", "tag", "</q>"), "<q>How are you?</q>"), "<q>How are you?</q>")
        self.assertEqual(self.answer(CharsStrat("string", stop='"'), 'say \\"Hello\\""'), 'say \\"Hello\\"')
        items = ListStrat(CharsStrat("string", stop='"'), open="[", close="]", wrap='"')
        self.assertEqual(self.answer(items, '["a", "b, c"]'), '["a", "b, c"]')
        self.assertEqual(self.answer(items, "[]"), "[]")

    def test_model_continues_after_answer(self):
        answer, result = self.ask(ChoicesStrat(["yes", "no"]), "no")
        self.assertEqual((answer, result.text, result.finish_reason), ("no", "Hello", "stop"))

    def test_token_that_continues_after_end_is_not_drawn(self):
        vocabulary = WordTokenizer([".)", "ab.)"])
        got = []
        ask = self_prompt_mod(prompt="?", strategy=UntilStrat(None, "tag", "."), on_answer=lambda _, a: got.append(a))
        run(ask, model={"?": "ab.)"}, tokenizer=vocabulary, max_tokens=8).check()
        self.assertEqual(got, ["ab."])


class Masks(unittest.TestCase):
    def test_masks_match_check_of_every_token(self):
        vocabulary = WordTokenizer()
        pieces = token_pieces(vocabulary)
        for strategy, beginning in [
            (CharsStrat("string", stop='",'), "a"),
            (CharsStrat("alpha", stop=400, min=2), "abc"),
            (CharsStrat("alpha", stop=4), "abc"),
            (UntilStrat(None, "tag", '"]'), 'x"'),
            (ListStrat(CharsStrat("string", stop='"'), open="[", close="]", wrap='"'), '["a'),
        ]:
            automaton = shared_automaton(strategy.into_strategy(vocabulary).language)
            state = automaton.read(0, beginning.encode())
            expected = {
                token
                for token in range(len(vocabulary))
                if pieces.token_bytes(token) and automaton.read(state, pieces.token_bytes(token)) >= 0
            }
            self.assertEqual(automaton.mask(state, pieces).allowed(), expected, strategy)
            self.assertTrue(expected)

    def test_impossible_bounds_raise_value_error(self):
        for strategy, message in [
            (ChoicesStrat([]), "at least one text"),
            (CharsStrat("numeric", min=5, stop=3), "min 5 and max 3"),
            (CharsStrat("numeric"), "stop or max is missing"),
            (UntilStrat("", "tag", ""), "must not be empty"),
            (ListStrat(ChoicesStrat(["a"]), min=3, max=2), "min 3 and max 2"),
        ]:
            with self.assertRaisesRegex(ValueError, message):
                strategy.into_strategy(None)

    def test_vocabulary_without_needed_bytes_is_reported(self):
        class OnlyX:
            eos_token_id = 1

            def __len__(self):
                return 2

            def encode(self, text, add_special_tokens=False):
                return [0]

            def decode(self, ids, skip_special_tokens=False):
                return "".join("x" for token in ids if token == 0)

        pieces = token_pieces(OnlyX())
        automaton = shared_automaton(ChoicesStrat(["yes"]).into_strategy(None).language)
        self.assertEqual(automaton.mask(0, pieces).allowed(), set())


class EvenDigits(Strategy):
    """A custom strategy like those of Quote mods: sets of tokens."""

    def start(self, tokenizer):
        return {"count": 0}

    def allowed_tokens(self, state, tokenizer):
        return {ord(digit) for digit in "02468"}

    def disallowed_tokens(self, state, tokenizer):
        return {ord("0")}

    def step(self, state, token_id, tokenizer):
        state["count"] += 1
        return None

    def is_complete(self, state):
        return state["count"] == 3

    def trim_answer(self, answer):
        return answer[:2]


class OwnStrategies(unittest.TestCase):
    def test_custom_strategy_of_token_sets(self):
        for answer in answers(EvenDigits(), seeds=4):
            self.assertRegex(answer, "^[2468]{2}$")

    def matches(self, strategy, pattern):
        kept = [answer for answer in answers(strategy) if answer is not None]
        self.assertGreaterEqual(len(kept), SEEDS // 2, kept)
        for answer in kept:
            self.assertRegex(answer, re.compile(r"\A(?:%s)\Z" % pattern))
        return kept

    def test_list_of_custom_strategies(self):
        digits = "[2468]{3}"
        self.matches(
            ListStrat(EvenDigits(), open="[", close="]", wrap="'", min=2, max=3),
            r"\['%s'(, '%s'){1,2}\]" % (digits, digits),
        )
        kept = self.matches(ListStrat(EvenDigits(), sep="-", max=2), "(%s(-%s)?)?" % (digits, digits))
        self.assertGreater(len({answer.count("-") for answer in kept}), 1, "the model may end the list at any element")

    def test_list_of_custom_and_own_strategies(self):
        word = CharsStrat(CharsMode.ALPHA, stop="; ", min=1, max=4)
        choice = ChoicesStrat(["no", "no world"])
        self.matches(
            ListStrat([word, EvenDigits(), choice], open="<", close=">", sep="; "),
            "<[^\\W\\d_]{1,4}; [2468]{3}; no( world)?>",
        )
        inner = ListStrat(EvenDigits(), open="(", close=")", sep="+", min=1, max=2)
        self.matches(ListStrat([choice, inner], sep=": "), r"no( world)?: \([2468]{3}(\+[2468]{3})?\)")

    def test_invalid_strategy_raises_type_error(self):
        with self.assertRaisesRegex(TypeError, "ChoicesStrat"):
            ListStrat(["yes"]).into_strategy(None)
        ask = self_prompt_mod(prompt="?", strategy="yes or no")
        (exception, *_) = run(ask, model="a").exceptions()
        self.assertIsInstance(exception, TypeError)
        self.assertIn("ChoicesStrat", str(exception))


if __name__ == "__main__":
    unittest.main()
