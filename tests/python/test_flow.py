"""Flows: series of questions, and the routes of their answers."""

import math
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
from thunder_mods import Added, CharsStrat, ChoicesStrat, ForwardPass, mod, tool_call
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

    def test_erased_question_is_not_in_answer_that_ends_before_it(self):
        entry = question("Urgent\n").then(route_noop())
        model = Scripted("Hello world\nmore", {"Urgent\n? (yes/no): ": "no"})
        result = run(flow_mod(entry), model=model, stop=["\n"]).check()
        self.assertEqual((result.text, result.finish_reason, result.seen()), ("Hello world", "stop", "Hello world"))
        result = run(flow_mod(entry), model=model, max_steps=2).check()
        self.assertEqual((result.text, result.finish_reason, result.sent), ("", "length", []))

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


def steered(entry, change, events=(ForwardPass,)):
    """Returns a mod that asks a question, and calls `change(state)` once at an event within it."""
    flow = flow_mod(entry)

    @mod
    def steer(event, actions, tokenizer):
        state = flow.engine.state(event.request_id)
        if isinstance(event, events) and event.context_info.tokens[event.context_info.prompt_len :] and "changed" not in state.data:
            state.data["changed"] = True
            change(state)
        return flow.engine.handle_event(event, actions, tokenizer)

    steer.engine = flow.engine
    return steer


class Replacements(unittest.TestCase):
    """A route or another question replaces a question that is not complete."""

    def steer(self, change, erase="all", events=(ForwardPass,)):
        steer = steered(question("A", erase=erase), change, events)
        result = run(steer, model=Scripted("Hello", {"A? (yes/no): ": "yes", "B? (yes/no): ": "no"})).check()
        self.assertEqual((result.seen(), steer.engine._active), (result.text, {}))
        return result.text

    def test_replaced_question_is_erased(self):
        for erase in ("all", "prompt"):
            for route, text in ((route_message("taken"), "taken"), (route_output("taken"), "taken"), (route_noop(), "Hello")):
                self.assertEqual(self.steer(lambda state: setattr(state, "pending_route", route), erase), text)

    def test_replaced_question_without_erase_mode_is_kept(self):
        text = self.steer(lambda state: setattr(state, "pending_route", route_message("taken")), None)
        self.assertEqual(text, " A? (yes/no): taken")

    def test_other_question_follows_erased_question(self):
        for next_question, text in (
            (question("B", erase=None, completion_text="").then(route_message(".")), " B? (yes/no): no."),
            (question("B").then(route_noop()), "Hello"),
            (question("B").with_auto_answer(lambda state: "yes").then(route_noop()), "Hello"),
        ):
            for name in ("pending_route", "current_question"):
                for events in ((ForwardPass,), (Added,)):
                    with self.subTest(name=name, events=events, text=text):
                        self.assertEqual(self.steer(lambda state: setattr(state, name, next_question), events=events), text)

    def test_end_of_flow_erases_question(self):
        self.assertEqual(self.steer(lambda state: setattr(state, "current_question", None)), "Hello")

    def test_end_of_flow_erases_question_after_another_mod_wins(self):
        active = []

        @mod(events=[Added])
        def wins(event, actions, tokenizer):
            active.append(len(steer.engine._active))
            if len(active) == 1:
                return actions.force_tokens([ord("!")])

        steer = steered(question("A"), lambda state: setattr(state, "current_question", None), (Added,))
        result = run([wins, steer], model=Scripted("Hello world", {"A? (yes/no): ": "yes"})).check()
        self.assertEqual((result.text, result.seen(), active[-1]), ("! world", "! world", 0))
        self.assertGreater(len(result.sent), 1)


class Errors(unittest.TestCase):
    def test_error_in_replacing_question_ends_flow(self):
        def fail(state):
            raise KeyError("missing")

        for failing in (question("B").with_auto_answer(fail), FlowQuestion("B", fail, ChoicesStrat(["yes", "no"]))):
            steer = steered(question("A"), lambda state: setattr(state, "pending_route", route_question(failing)))
            result = run(steer, model=Scripted("Hello", {"A? (yes/no): ": "yes"}))
            self.assertEqual(([type(error) for error in result.exceptions()], result.text), ([KeyError], "Hello"))

    def test_error_in_function_is_reported_and_ends_flow(self):
        entry = question("A").branch(lambda state: state.answers["missing"])
        model = Scripted("Hello world", {"A? (yes/no): ": "yes"})
        result = run(flow_mod(entry), model=model)
        self.assertEqual([type(error) for error in result.exceptions()], [KeyError])
        self.assertEqual(result.text, "Hello world")

    def test_question_with_error_is_erased_and_has_no_answer(self):
        @mod
        def ban(event, actions, tokenizer):
            if isinstance(event, ForwardPass):
                answers = [token for token in range(len(tokenizer)) if tokenizer.piece(token)[:1] in (b"y", b"n")]
                return actions.adjust_logits(set=dict.fromkeys(answers, -math.inf))

        routed = []
        entry = question("Secret").branch(lambda state: routed.append(dict(state.answers)) or route_noop())
        result = run([ban, flow_mod(entry)], model="Hello world")
        self.assertIn("banned every token", str(result.exceptions()[0]))
        self.assertEqual((result.text, result.sent, routed), ("Hello world", ["Hello", " world"], [{}]))

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
