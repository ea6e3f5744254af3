"""Mods like those in the documentation of the Quote SDK, with its names and calling conventions."""

import json
import re
import unittest
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from max.driver import Tensor
from quote_mod_sdk import (
    Added,
    AddedEvent,
    ForwardPass,
    ForwardPassEvent,
    ModEvent,
    Prefilled,
    Sampled,
    get_conversation,
    get_schemas,
    mod,
    self_prompt_constrained_mod,
    tokenize,
)
from quote_mod_sdk.flow import FlowDefinition, FlowEngine, FlowQuestion, route_output, route_question, route_summary
from quote_mod_sdk.mod import ActionBuilder
from quote_mod_sdk.self_prompt import EraseMode, SelfPrompt
from quote_mod_sdk.strategies.primitives import UntilEndType
from quote_mod_sdk.strategies.strategy_constructor import CharsMode, CharsStrat, ChoicesStrat, ListStrat, UntilStrat
from shared.types import AdjustedLogits, AdjustedPrefill, ForceTokens
from thunder_mods.events import ContextInfo
from thunder_mods.testing import RandomWeights, Scripted, WordTokenizer, run


try:
    import numpy
except ImportError:
    numpy = None


@mod
def polite_prompt(event: ModEvent, action: ActionBuilder, tokenizer: Any):
    if isinstance(event, Prefilled):
        text = tokenizer.decode(event.context_info.tokens[: event.context_info._prompt_len])
        if "Shout" in text:
            ids = tokenizer.encode(text.replace("Shout", "Whisper"), add_special_tokens=False)
            return action.adjust_prefill(ids, max_steps=0)
    return action.noop()


@mod
def no_dash(event: ModEvent, action: ActionBuilder, tokenizer: Any):
    if isinstance(event, ForwardPass):
        rows = event.logits.to_numpy()
        (dash,) = tokenizer.encode("-", add_special_tokens=False)
        rows[0, dash] = -1e9
        return action.adjust_logits(Tensor.from_numpy(rows))
    return action.noop()


@dataclass
class Recorder:
    text: str = ""
    done: bool = False
    ids: List[int] = field(default_factory=list)


recorders: Dict[str, Recorder] = {}


@mod
def both_greetings(event: ModEvent, action: ActionBuilder, tokenizer: Any):
    if isinstance(event, Added) and not event.forced:
        recorder = recorders.setdefault(event.request_id, Recorder())
        for token in event.added_tokens:
            recorder.text += tokenizer.decode(token)
        if recorder.text.endswith("hello") and not recorder.done:
            recorder.done = True
            return action.force_tokens(tokenize(" and goodbye.", tokenizer))
    return action.noop()


@mod
def replaces_first_draw(event: ModEvent, action: ActionBuilder, tokenizer: Any):
    if isinstance(event, Sampled):
        recorder = recorders.setdefault("drawn " + event.request_id, Recorder())
        if not recorder.done:
            recorder.done = True
            return action.force_tokens(tokenizer.encode("[seen]", add_special_tokens=False))
    return action.noop()


@mod
def small_talk(event: ModEvent, action: ActionBuilder, tokenizer: Any):
    if isinstance(event, Prefilled):
        turns = [turn for turn in get_conversation() if turn["role"] == "user"]
        if turns and turns[-1]["content"].strip().lower() == "thanks":
            return action.force_output(tokens=tokenize("You are welcome.", tokenizer))
        if turns and "weather" in turns[-1]["content"]:
            name = get_schemas()[0]["function"]["name"]
            call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps({"city": "Rome"})}}
            return action.tool_calls(call)
    return action.noop()


FENCE = re.compile(r"```json\n(.*?)```", re.S)


@mod
def only_valid_json(event: ModEvent, action: ActionBuilder, tokenizer: Any):
    """Backtracks to the first error in a block of JSON, and bans the token there."""
    recorder = recorders.setdefault(event.request_id, Recorder())
    if isinstance(event, ForwardPass) and recorder.ids:
        rows = event.logits.to_numpy()
        rows[0, recorder.ids.pop()] = -1e9
        return action.adjust_logits(rows)
    if isinstance(event, Added):
        ids = event.context_info.tokens[event.context_info._prompt_len :]
        pieces = [tokenizer.decode(token) for token in ids]
        found = FENCE.search("".join(pieces))
        if found:
            try:
                json.loads(found.group(1))
            except json.JSONDecodeError as error:
                token, at = 0, found.start(1) + error.pos
                while at >= len(pieces[token]):
                    at -= len(pieces[token])
                    token += 1
                recorder.ids.append(ids[token])
                return action.backtrack(len(ids) - token)
    return action.noop()


def tagged_question():
    return SelfPrompt(
        prompt={"text": " <ask>"},
        strategy=UntilStrat("", UntilEndType.TAG, "</ask>"),
        completion={"suffix": "!", "force": True},
        erase=EraseMode.NONE,
    )


def steps_of(chosen):
    """Returns the steps of the first events of the mod."""
    seen = []
    run((chosen, {"seen": seen}), model="abc").check()
    return seen


@mod
def quote_steps(event: ModEvent, action: ActionBuilder, tokenizer: Any):
    event.config["seen"].append((type(event).__name__, event.step))
    return action.noop()


@mod
def greets_first(event: ModEvent, action: ActionBuilder, tokenizer: Any):
    """Example of Quote's README."""
    if isinstance(event, ForwardPass) and event.step == 0:
        return action.force_tokens(tokenizer.encode("Greetings! ", add_special_tokens=False))
    return action.noop()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@mod
def prints_schemas(event: ModEvent, action: ActionBuilder, tokenizer: Any):
    if isinstance(event, Prefilled):
        print(json.dumps(get_schemas()))
    return action.noop()


class Semantics(unittest.TestCase):
    def test_quote_steps_start_at_zero_for_each_event(self):
        first = [("Prefilled", 0), ("ForwardPass", 0), ("Sampled", 0), ("Added", 0), ("ForwardPass", 1), ("Sampled", 1)]
        self.assertEqual(steps_of(quote_steps)[:6], first)
        self.assertTrue(run(greets_first, model="hi").check().text.startswith("Greetings! "))

    def test_schemas_start_with_response_format(self):
        named = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        for form, tools, expected in [
            (named, [TOOL], [SCHEMA, TOOL]),
            (named, None, [SCHEMA]),
            ({"type": "json_object"}, [TOOL], [{"type": "json_object"}, TOOL]),
            (None, [TOOL], [TOOL]),
            (None, None, []),
        ]:
            result = run(prints_schemas, model="x", max_tokens=1, tools=tools, response_format=form).check()
            self.assertEqual(json.loads(result.logs()[0]), expected)


class Simple(unittest.TestCase):
    def test_each_action_is_applied(self):
        tokens = run(polite_prompt, "Shout hi", model="x").check().prompt_tokens
        self.assertEqual(WordTokenizer().decode(tokens), "Whisper hi")
        self.assertNotIn("-", run(no_dash, model=RandomWeights(1), temperature=1.0, max_tokens=200).check().text)
        self.assertEqual(run(both_greetings, model="hello you").check().text, "hello and goodbye.")
        self.assertTrue(run(replaces_first_draw, model="hi").check().text.startswith("[seen]"))

    def test_conversation_decides_action(self):
        turns = [{"role": "user", "content": "Thanks "}]
        result = run(small_talk, "p", model="x", conversation=turns).check()
        self.assertEqual((result.text, result.finish_reason), ("You are welcome.", "stop"))
        tools = [{"type": "function", "function": {"name": "forecast", "parameters": {}}}]
        turns = [{"role": "user", "content": "weather?"}]
        result = run(small_talk, "p", model="x", conversation=turns, tools=tools).check()
        self.assertEqual(result.finish_reason, "tool_calls")
        self.assertEqual(result.tool_calls[0]["function"]["name"], "forecast")

    def test_invalid_text_is_generated_again(self):
        result = run(only_valid_json, model=Scripted("```json\n{]}```"), max_tokens=60).check()
        self.assertTrue(result.actions("Backtrack"))
        self.assertFalse(result.text.startswith("```json\n{]}"), result.text)

    @unittest.skipIf(numpy is None, "numpy is not installed")
    def test_mod_can_be_called_directly(self):
        tokenizer = WordTokenizer()
        ids = tokenizer.encode("Shout hi", add_special_tokens=False)
        action = polite_prompt(Prefilled("r", 0, 10, ContextInfo(ids)), tokenizer)
        self.assertIsInstance(action, AdjustedPrefill)
        self.assertEqual(tokenizer.decode(action.tokens), "Whisper hi")
        rows = numpy.zeros((1, len(tokenizer)), dtype=numpy.float32)
        action = no_dash(ForwardPass("r", 1, Tensor.from_numpy(rows)), tokenizer)
        self.assertIsInstance(action, AdjustedLogits)
        added = Added("by-hand", 1, tokenizer.encode("hello", add_special_tokens=False), False)
        self.assertIsInstance(both_greetings(added, tokenizer), ForceTokens)

    def test_first_sdk_names_are_importable(self):
        self.assertIs(ForwardPassEvent, ForwardPass)
        self.assertIs(AddedEvent, Added)
        options = {"allowed_responses": ["yes", "no"], "prompt_text": " Sure? ", "mask_value": -1e9, "tokenizer": None}
        for erase, text in ((None, r" Sure\? (yes|no)\n"), ("prompt_only", "(yes|no)"), ("all", "")):
            ask = self_prompt_constrained_mod(completion_text="\n", erase_after_complete=erase, **options)
            result = run(ask, model=Scripted("Then more."), max_tokens=60).check()
            self.assertRegex(result.text, r"\A%s" % text)


class Scaffolding(unittest.TestCase):
    def test_unsure_model_asks_user(self):
        asked: Dict[str, SelfPrompt] = {}
        row: Dict[str, Any] = {}

        @mod
        def unsure(event, actions, tokenizer):
            question = asked.get(event.request_id)
            if question is None:
                if isinstance(event, ForwardPass):
                    logprobs, _ = event.top_k_logprob(2)
                    row["best"] = float(logprobs[0][0])
                elif isinstance(event, Added) and event.step > 2 and row["best"] < 0:
                    question = asked[event.request_id] = tagged_question()
                    question.handle_prefilled(event, tokenizer)
                return actions.noop()
            if question.is_complete(event.request_id) and isinstance(event, ForwardPass):
                return actions.force_output(question.answer_tokens(event.request_id))
            if isinstance(event, ForwardPass):
                return question.handle_forward_pass(event, actions, tokenizer)
            if isinstance(event, Added):
                return question.handle_added(event, actions, tokenizer)
            return actions.noop()

        model = Scripted("one two three four five six", {" <ask>": "Which one?</ask>"})
        result = run(unsure, model=model, max_tokens=60)
        self.assertEqual((result.exceptions(), result.text, result.finish_reason), ([], "Which one?</ask>", "stop"))

    def test_schema_is_filled_by_questions(self):
        @dataclass
        class Form:
            request_id: str
            current_question: Optional[FlowQuestion] = None
            pending_route: Optional[Any] = None
            answers: Dict[str, str] = field(default_factory=dict)
            data: Dict[str, Any] = field(default_factory=dict)

        words = CharsStrat(CharsMode.STRING, stop='"', max=8)
        fields = {
            "name": (CharsStrat(CharsMode.STRING, stop="\n", min=1, max=8), str),
            "age": (CharsStrat(CharsMode.NUMERIC, stop="\n", min=1, max=3), int),
            "old": (ChoicesStrat(["true", "false"]), json.loads),
            "tags": (ListStrat(words, open="[", close="]", wrap='"', sep=", ", min=1, max=2, end_with="\n"), json.loads),
        }
        questions = [
            FlowQuestion(
                name=name,
                prompt=" Generate %s: " % name,
                strategy=strategy,
                erase_mode=EraseMode.ALL,
                assignments=[lambda state, answer, name=name, read=read: state.data.update({name: read(answer)})],
            )
            for name, (strategy, read) in fields.items()
        ]
        for before, following in zip(questions, questions[1:]):
            before.then(route_question(following))
        questions[-1].then(lambda state: route_output(json.dumps(state.data)))
        engine = FlowEngine(entry_question=questions[0], state_factory=lambda request_id: Form(request_id=request_id))

        @mod
        def form(event, actions, tokenizer):
            return engine.handle_event(event, actions, tokenizer)

        complete = 0
        for seed in range(12):
            result = run(form, model=RandomWeights(seed), temperature=1.0, seed=seed, max_tokens=400)
            if result.exceptions():
                # A backslash escape that JSON does not define is kept as the model wrote it.
                self.assertIn("JSONDecodeError", repr(result.exceptions()))
                continue
            answer = json.loads(result.text)
            self.assertEqual(list(answer), list(fields))
            self.assertTrue(isinstance(answer["age"], int) and isinstance(answer["old"], bool))
            complete += 1
        self.assertGreater(complete, 2)

    def test_definition_summarizes_answers(self):
        first = FlowQuestion(name="a", prompt=" a? ", strategy=ChoicesStrat(["x", "y"]), erase_mode=EraseMode.ALL)
        flow = FlowDefinition(name="sum", root=first, summary_builder=lambda state: "a is %s" % state.answers["a"])
        first.then(route_summary(flow))
        engine = FlowEngine(entry_question=first, flows={"sum": flow})

        @mod
        def summed(event, actions, tokenizer):
            return engine.handle_event(event, actions, tokenizer)

        self.assertIn("a is y", run(summed, model=Scripted("z", {" a? ": "y"}), max_tokens=40).check().text)


class Letters:
    """A tokenizer with one character per token, like those in tests of mods."""

    eos_token_id = 0

    def encode(self, text, add_special_tokens=False):
        return [ord(char) for char in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(token) for token in ([ids] if isinstance(ids, int) else ids) if token)

    def get_vocab(self):
        return {chr(token): token for token in range(128)}


class StepByStep(unittest.TestCase):
    def read(self, strategy, text):
        """Reads a text token by token; each must be allowed, and the last one completes the answer."""
        letters = Letters()
        instance = strategy.into_strategy(letters)
        state = instance.start(letters)
        for at, char in enumerate(text):
            self.assertFalse(instance.is_complete(state), text[:at])
            self.assertIn(ord(char), instance.allowed_tokens(state, letters), text[: at + 1])
            self.assertIsNone(instance.step(state, ord(char), letters))
        self.assertTrue(instance.is_complete(state), text)

    def test_strategies_work_without_model(self):
        self.read(UntilStrat("<a>", UntilEndType.TAG, "</a>"), "<a>xyz</a>")
        self.read(UntilStrat("", UntilEndType.ANYCHAR, "\n."), "hello.")
        self.read(CharsStrat(CharsMode.ALPHA, stop=".", min=1), "abc.")
        self.read(CharsStrat(CharsMode.NUMERIC, stop=3), "123")
        once = CharsStrat(CharsMode.ALPHANUMERIC, stop=1)
        self.read(ListStrat(once, open="[", close="]", wrap='"', sep=", ", min=1, max=1, end_with="."), '["a"].')
        pair = [ChoicesStrat(["ab"]), ChoicesStrat(["cd"])]
        self.read(ListStrat(pair, open="[", close="]", wrap='""', sep=", ", end_with="OK"), '[""ab"", ""cd""]OK')
        self.read(ListStrat([ChoicesStrat(["x"]), ChoicesStrat(["y"])], open="<<", close=">", wrap="'"), "<<'x', 'y'>")


if __name__ == "__main__":
    unittest.main()
