"""Flows: the model answers a series of questions, and its answers decide what follows.

    urgent = FlowQuestion(name="urgent", prompt=" Urgent (yes/no): ", strategy=ChoicesStrat(["yes", "no"]), erase_mode="all")
    urgent.on("yes", route_output("Please call us at once.")).otherwise(route_noop())
    engine = FlowEngine(entry_question=urgent)

    @mod
    def triage(event, actions, tokenizer):
        return engine.handle_event(event, actions, tokenizer)
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Generic, List, Optional, Tuple, cast

from . import lifecycle
from .actions import ActionBuilder, ModAction
from .active_question import ActiveQuestion, EraseMode
from .events import Added, ForwardPass, ModEvent, Prefilled
from .routes import (
    FlowDefinition,
    FlowQuestion,
    FlowRoute,
    FlowState,
    RequestState,
    RouteKind,
    RouteSpec,
    RouteTarget,
    TState,
    coerce_route,
    route_message,
    route_noop,
    route_output,
    route_question,
    route_summary,
    route_tool,
)
from .self_prompt import token_ids
from .strategies.masks import end_tokens, token_pieces
from .strategies.strategy_constructor import into_strategy

__all__ = [
    "EraseMode",
    "FlowDefinition",
    "FlowEngine",
    "FlowQuestion",
    "FlowRoute",
    "FlowState",
    "RequestState",
    "RouteKind",
    "RouteSpec",
    "RouteTarget",
    "route_message",
    "route_noop",
    "route_output",
    "route_question",
    "route_summary",
    "route_tool",
]

#: Maximum consecutive questions that are answered without the model at one event.
_MAX_ROUTES = 1000


class FlowEngine(Generic[TState]):
    """Asks the questions of a flow in every run whose events it handles.

    entry_question: the first question. flows: definitions whose summaries `route_summary` writes.
    state_factory: creates the state of a run from its request id, by default a `RequestState`.
    """

    def __init__(
        self,
        *,
        entry_question: FlowQuestion[TState],
        flows: Optional[Dict[str, FlowDefinition[TState]]] = None,
        state_factory: Optional[Callable[[str], TState]] = None,
    ) -> None:
        self.entry_question = entry_question
        self.flows = dict(flows or {})
        self._state_factory = state_factory or (lambda request_id: cast(TState, RequestState(request_id)))
        self._states: Dict[str, TState] = {}
        #: Active question of each run; without its definition if another question or a route replaces it.
        self._active: Dict[str, Tuple[Optional[FlowQuestion[TState]], ActiveQuestion]] = {}
        self._started: "set[str]" = set()
        lifecycle.register(self)

    def state(self, request_id: str) -> TState:
        """Returns the state of a run, with its answers."""
        state = self._states.get(request_id)
        if state is None:
            state = self._states[request_id] = self._state_factory(request_id)
        return state

    _get_state = state

    def finished(self, request_id: str) -> None:
        """Removes the state of a run; called automatically when the run ends."""
        self._states.pop(request_id, None)
        self._active.pop(request_id, None)
        self._started.discard(request_id)

    def handle_event(self, event: ModEvent, actions: ActionBuilder, tokenizer: Any) -> ModAction:
        """Returns the action for an event. The mod passes every event and returns the result.

        A function of the flow that raises an exception ends the flow. A question that raises one has no answer."""
        request_id = event.request_id
        state = self.state(request_id)
        if request_id not in self._started:
            self._started.add(request_id)
            state.current_question, state.pending_route = self.entry_question, None
        if isinstance(event, Prefilled) and tokenizer is not None:
            token_pieces(tokenizer)  # slow the first time, so done before generation
        if not isinstance(event, (ForwardPass, Added)) or tokenizer is None:
            return actions.noop()
        try:
            return self._advance(event, state, actions, tokenizer)
        except Exception:
            _, active = self._active.get(request_id, (None, None))
            if active is None:
                state.current_question = None
            else:
                active.give_up()  # its text must still be erased
            raise

    def _advance(self, event: Any, state: TState, actions: ActionBuilder, tokenizer: Any) -> ModAction:
        """Advances the flow as far as possible with this event."""
        takes_route = state.pending_route is not None and isinstance(event, ForwardPass)
        active_question, active = self._active.get(state.request_id, (None, None))
        if active is not None and (takes_route or active_question is None or active_question is not state.current_question):
            # It was replaced, which None marks; its text is erased before the flow continues.
            self._active[state.request_id] = (None, active)
            active.give_up()
            action = active.handle(event, actions)
            if active.is_over:
                del self._active[state.request_id]
            if not active.is_over or isinstance(event, Added):
                return action or actions.noop()
        if takes_route:
            route, state.pending_route = state.pending_route, None
            action = self._perform(coerce_route(route), state, actions, tokenizer)
            if action is not None:
                return action
        for _ in range(_MAX_ROUTES):
            question = state.current_question
            if question is None:
                return actions.noop()
            _, active = self._active.get(state.request_id, (None, None))
            answer: Optional[str] = None
            if active is None:
                answer = question.auto_answer_fn(state) if question.auto_answer_fn else None
                answer = answer.strip() if answer else None
                if not answer:
                    active = self._start_question(question, state, tokenizer)
                    self._active[state.request_id] = (question, active)
                    if isinstance(event, Added):
                        return active.begin(event, actions) or actions.noop()
            if active is not None:
                action = active.handle(event, actions)
                if not active.is_over:
                    return action or actions.noop()
                answer = active.text
                del self._active[state.request_id]
            action = self._store_answer(question, answer, state, actions, tokenizer)
            if action is not None:
                return action
        raise RuntimeError("the flow answered %d questions in a row without the model" % _MAX_ROUTES)

    def _store_answer(
        self, question: FlowQuestion[TState], answer: Optional[str], state: TState, actions: ActionBuilder, tokenizer: Any
    ) -> Optional[ModAction]:
        """Stores the answer and follows its route. Returns None if another question is next."""
        if answer is not None:
            state.answers[question.name] = answer
            for assign in question.assignments:
                assign(state, answer)
        route = question.resolve_route(state, answer)
        return self._perform(route or route_noop(), state, actions, tokenizer)

    def _start_question(self, question: FlowQuestion[TState], state: TState, tokenizer: Any) -> ActiveQuestion:
        prompt = question.prompt(state) if callable(question.prompt) else question.prompt
        return ActiveQuestion(
            tokenizer,
            token_ids(prompt, tokenizer),
            into_strategy(question.strategy, tokenizer),
            token_ids(question.completion_text, tokenizer),
            EraseMode.parse(question.erase_mode),
            question.argmax_sampling,
        )

    def _perform(
        self, route: FlowRoute[Any], state: TState, actions: ActionBuilder, tokenizer: Any
    ) -> Optional[ModAction]:
        """Performs a route. Returns None if the state's question is next."""
        for _ in range(_MAX_ROUTES):
            if route.kind is RouteKind.QUESTION:
                state.current_question = route.target
                return None
            if route.kind is not RouteKind.TOOL or route.callback is None:
                break
            result = self._call(route.callback, state, actions, tokenizer)
            if isinstance(result, ModAction):
                state.current_question = None
                return result
            route = coerce_route(result)
        question, state.current_question = state.current_question, None
        if route.kind is RouteKind.OUTPUT:
            return actions.force_output(token_ids(route.message, tokenizer))
        if route.kind is RouteKind.NOOP:
            return actions.noop()
        text = self._summary(question, state, route.message) if route.kind is RouteKind.SUMMARY else route.message
        return _closing_action(text or "", actions, tokenizer)

    @staticmethod
    def _call(callback: Callable[..., Any], state: TState, actions: ActionBuilder, tokenizer: Any) -> Any:
        try:
            parameters: List[Any] = list(inspect.signature(callback).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        required = [
            parameter
            for parameter in parameters
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        takes_more = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
        if len(required) == 1 and len(parameters) < 3 and not takes_more:
            return callback(state)
        return callback(actions, state, tokenizer)

    def _summary(self, question: Any, state: TState, message: Optional[str]) -> str:
        for flow in self.flows.values():
            if question in flow.all_questions():
                return flow.summary_builder(state)
        return message or "Flow complete."


def _closing_action(text: str, actions: ActionBuilder, tokenizer: Any) -> ModAction:
    """Returns the action that appends the text and the end of the answer."""
    eos = getattr(tokenizer, "eos_token_id", None)
    ends = [int(eos)] if eos is not None else end_tokens(tokenizer)[:1]
    tokens = token_ids(text, tokenizer) + ends
    return actions.force_tokens(tokens) if tokens else actions.noop()
