"""Mods that ask the model questions with constrained answers."""

from quote_mod_sdk import Added, ForwardPass, Prefilled, mod, self_prompt_mod
from quote_mod_sdk.flow import FlowEngine, FlowQuestion, route_message, route_noop, route_output, route_tool
from quote_mod_sdk.self_prompt import EraseMode, SelfPrompt
from quote_mod_sdk.strategies import CharsMode, CharsStrat, ChoicesStrat, ListStrat, UntilStrat
from quote_mod_sdk.strategies.primitives import UntilEndType
from thunder_mods import tool_call

STRATEGIES = {
    "choices": ChoicesStrat(["yes", "no", "not yet"]),
    "until": UntilStrat("<q>", UntilEndType.ANYCHAR, ".!?eaio"),
    "digits": CharsStrat(CharsMode.NUMERIC, min=4, stop=4),
    "letters": CharsStrat(CharsMode.ALPHA, stop=";", min=1, max=12),
    "float": CharsStrat(CharsMode.JS_FLOAT, stop="\n", max=8),
    "list": ListStrat(CharsStrat(CharsMode.ALPHANUMERIC, stop='"', max=5), open="[", close="]", wrap='"', min=1, max=3),
}
QUESTIONS = {name: SelfPrompt(strategy=strategy, completion="|||") for name, strategy in STRATEGIES.items()}


@mod(config={"strategy": "choices"})
def constrained(event, actions, tokenizer):
    """Begins every answer with a text that a strategy constrains, and three bars."""
    question = QUESTIONS[event.config["strategy"]]
    if isinstance(event, Prefilled):
        question.handle_prefilled(event, tokenizer)
    if isinstance(event, ForwardPass):
        return question.handle_forward_pass(event, actions, tokenizer)
    if isinstance(event, Added):
        return question.handle_added(event, actions, tokenizer)
    return actions.noop()


def print_answer(request_id, answer):
    print("answer", answer)


hidden = self_prompt_mod(
    prompt=" [Is this a story? yes or no: ", strategy=ChoicesStrat(["yes", "no"]), erase=EraseMode.ALL, on_answer=print_answer
)
prompt_hidden = self_prompt_mod(prompt=" [yes or no: ", strategy=ChoicesStrat(["yes", "no"]), erase="prompt")

guarded_question = SelfPrompt(prompt=" [yes or no: ", strategy=ChoicesStrat(["yes", "no"]), erase="all")


@mod
def guarded(event, actions, tokenizer):
    """Asks a hidden question, and passes it no more events once its answer is complete."""
    if guarded_question.is_complete(event.request_id):
        return actions.noop()
    if isinstance(event, ForwardPass):
        return guarded_question.handle_forward_pass(event, actions, tokenizer)
    if isinstance(event, Added):
        return guarded_question.handle_added(event, actions, tokenizer)


name = FlowQuestion("name", " [a name: ", CharsStrat(CharsMode.ALPHA, stop="]", min=2, max=6), erase_mode="all")
kind = FlowQuestion("kind", " [left, right, on, call: ", ChoicesStrat(["left", "right", "on", "call"]), erase_mode="all")
kind.on("left", name.then(lambda state: route_output("left " + state.answers["name"])))
kind.on("right", route_message("right."))
kind.on("on", route_noop())
kind.on("call", route_tool(lambda actions, state, tokenizer: actions.tool_calls(tool_call("turn", state.answers, id="1"))))
ENGINE = FlowEngine(entry_question=kind)


@mod
def branches(event, actions, tokenizer):
    """Takes one of four branches, depending on the model's answer."""
    return ENGINE.handle_event(event, actions, tokenizer)
