"""Flows: series of questions, and the routes of their answers."""

import unittest
from dataclasses import dataclass, field
from typing import Any, Dict, Optional

from quote_mod_sdk.flow import (
    FlowDefinition,
    FlowEngine,
    FlowQuestion,
    route_message,
    route_noop,
    route_output,
    route_question,
    route_summary,
    route_tool,
)
from quote_mod_sdk.self_prompt import EraseMode
from thunder_mods import CharsStrat, ChoicesStrat, mod, tool_call
from thunder_mods.testing import Engine, RandomWeights, Scripted, run


def question(name, choices=("yes", "no"), erase=EraseMode.ALL, **more):
    return FlowQuestion(
        name=name, prompt=" %s? (yes/no): " % name, strategy=ChoicesStrat(list(choices)), erase_mode=erase, **more
    )


def flow_mod(entry, **options):
    engine = FlowEngine(entry_question=entry, **options)

    @mod
    def flow(event, actions, tokenizer):
        return engine.handle_event(event, actions, tokenizer)

    flow.engine = engine
    return flow


def run_flow(entry, answers, text="Hello world", **options):
    model = Scripted(text, {"%s? (yes/no): " % name: answer for name, answer in answers.items()})
    return run(flow_mod(entry, **options), model=model).check()


class Routes(unittest.TestCase):
    def test_answer_selects_output(self):
        for answer, text in (("yes", "Done."), ("no", "Not done.")):
            entry = question("Sure").on("YES", route_output("Done.")).on("no", route_output("Not done."))
            result = run_flow(entry, {"Sure": answer})
            self.assertEqual((result.text, result.finish_reason), (text, "stop"))

    def test_questions_follow_in_order(self):
        kept = {}
        last = question("Third").assign(lambda state, answer: kept.update(state.answers)).then(route_noop())
        second = question("Second").then(last)
        entry = question("First").on("yes", route_question(second)).otherwise(route_output("never"))
        result = run_flow(entry, {"First": "yes", "Second": "no", "Third": "yes"})
        self.assertEqual(kept, {"First": "yes", "Second": "no", "Third": "yes"})
        self.assertEqual(result.text, "Hello world")
        self.assertEqual(result.seen(), "Hello world")

    def test_text_without_erase_mode_is_kept(self):
        entry = question("A", erase=None).then(question("B", erase="prompt").then(route_noop()))
        self.assertEqual(run_flow(entry, {"A": "yes", "B": "no"}).text[:24], " A? (yes/no): yes\nno")

    def test_message_route_ends_answer(self):
        entry = question("A", erase=EraseMode.NONE, completion_text=" ").then(route_message("Goodbye."))
        result = run_flow(entry, {"A": "yes"})
        self.assertEqual((result.text, result.finish_reason), (" A? (yes/no): yes Goodbye.", "stop"))
        self.assertEqual(run_flow(question("A").then("Goodbye."), {"A": "no"}).text, "Goodbye.")

    def test_tool_route_calls_function(self):
        def book(actions, state, tokenizer):
            return actions.tool_calls(tool_call("book", {"sure": state.answers["A"]}, id="1"))

        result = run_flow(question("A").on("yes", route_tool(book)), {"A": "yes"})
        self.assertEqual(result.finish_reason, "tool_calls")
        self.assertEqual(result.tool_calls, [{"id": "1", "type": "function", "function": {"name": "book", "arguments": '{"sure": "yes"}'}}])
        self.assertEqual(result.text, "")

    def test_tool_can_return_route(self):
        for callback in (lambda state: route_output(state.answers["A"]), lambda actions, state, tokenizer: route_output("yes")):
            self.assertEqual(run_flow(question("A").then(route_tool(callback)), {"A": "yes"}).text, "yes")

    def test_branch_function_selects_route(self):
        entry = question("A").branch(lambda state: None).branch(lambda state: lambda again: route_output(again.answers["A"] + "!"))
        self.assertEqual(run_flow(entry, {"A": "no"}).text, "no!")

    def test_answer_without_route_ends_flow(self):
        self.assertEqual(run_flow(question("A").on("yes", "x"), {"A": "no"}).text, "Hello world")

    def test_summary_route_appends_summary(self):
        entry = question("A").then(route_summary("none"))
        flows = {"f": FlowDefinition("f", entry, lambda state: "You said %s." % state.answers["A"])}
        self.assertEqual(run_flow(entry, {"A": "yes"}, flows=flows).text, "You said yes.")
        self.assertEqual(run_flow(entry, {"A": "yes"}).text, "none")

    def test_auto_answer_replaces_question(self):
        second = question("B").with_auto_answer(lambda state: " no ").on("no", route_output("right"))
        result = run_flow(question("A").then(second), {"A": "yes"})
        self.assertEqual(result.text, "right")
        self.assertNotIn("B?", "".join(event.text for event in result.events))
        self.assertEqual(run_flow(question("A").with_auto_answer(lambda state: "yes").on("yes", "x"), {}).text, "x")

    def test_question_can_repeat(self):
        entry = question("A")
        count = []
        entry.branch(lambda state: (count.append(1), entry if len(count) < 3 else route_output("x"))[1])
        self.assertEqual(run_flow(entry, {"A": "yes"}).text, "x")
        self.assertEqual(len(count), 3)

    def test_prompt_can_depend_on_state(self):
        second = FlowQuestion(
            name="b", prompt=lambda state: " %s? (yes/no): " % state.answers["A"], strategy=ChoicesStrat(["yes", "no"]), erase_mode="all"
        ).then(lambda state: route_output(state.answers["b"]))
        self.assertEqual(run_flow(question("A").then(second), {"A": "yes", "yes": "no"}).text, "no")


class Errors(unittest.TestCase):
    def test_error_in_function_is_reported_and_ends_flow(self):
        entry = question("A").branch(lambda state: state.answers["missing"])
        model = Scripted("Hello world", {"A? (yes/no): ": "yes"})
        result = run(flow_mod(entry), model=model)
        self.assertEqual([type(error) for error in result.exceptions()], [KeyError])
        self.assertEqual(result.text, "Hello world")

    def test_cycle_of_auto_answers_raises_runtime_error(self):
        entry = question("A").with_auto_answer(lambda state: "yes")
        entry.then(entry)
        result = run(flow_mod(entry), model="Hello")
        self.assertIn("in a row without the model", str(result.exceptions()[0]))
        self.assertEqual(result.text, "Hello")

    def test_flow_ends_with_any_model(self):
        ends = {"yes": "Y", "no": "N"}
        for seed in range(12):
            last = FlowQuestion("n", " Number: ", CharsStrat("numeric", min=2, stop=2), erase_mode="all")
            last.then(lambda state: route_output("%s %s" % (ends[state.answers["A"]], state.answers["n"])))
            result = run(flow_mod(question("A").then(last)), model=RandomWeights(seed), temperature=1.0, seed=seed).check()
            self.assertRegex(result.text, r"^[YN] \d\d$")
            self.assertEqual(result.seen(), result.text)


@dataclass
class OwnState:
    request_id: str
    current_question: Optional[FlowQuestion] = None
    pending_route: Optional[Any] = None
    answers: Dict[str, str] = field(default_factory=dict)
    data: Dict[str, Any] = field(default_factory=dict)
    user: Optional[str] = None


class States(unittest.TestCase):
    def test_custom_state_class_works(self):
        entry = question("A").assign(lambda state, answer: setattr(state, "user", answer))
        entry.then(lambda state: route_output("user %s" % state.user))
        self.assertEqual(run_flow(entry, {"A": "yes"}, state_factory=OwnState).text, "user yes")

    def test_pending_route_is_performed(self):
        flow = flow_mod(question("A"))

        @mod
        def steer(event, actions, tokenizer):
            state = flow.engine._get_state(event.request_id)
            if type(event).__name__ == "ForwardPass":
                state.pending_route = route_output("taken")
            return flow.engine.handle_event(event, actions, tokenizer)

        self.assertEqual(run(steer, model="Hello").check().text, "taken")

    def test_states_of_runs_are_separate_and_removed(self):
        flow = flow_mod(question("A").then(lambda state: route_output(state.request_id)))
        engine = Engine(Scripted("x", {"A? (yes/no): ": "yes"}))
        for number in range(30):
            self.assertEqual(engine.run(flow, request_id=str(number)).check().text, str(number))
        self.assertEqual((flow.engine._states, flow.engine._active, flow.engine._started), ({}, {}, set()))


if __name__ == "__main__":
    unittest.main()
