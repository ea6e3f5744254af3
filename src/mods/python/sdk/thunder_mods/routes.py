"""Questions of a flow, and the routes that follow their answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Callable, Dict, Generic, List, Optional, Protocol, Union, runtime_checkable

if TYPE_CHECKING:
    # Only available to type checkers. Its default makes RequestState the state type of flows that name none.
    from typing_extensions import TypeVar
else:
    from typing import TypeVar

from .active_question import EraseMode


class RouteKind(Enum):
    """Kind of a route."""

    #: Asks another question.
    QUESTION = auto()
    #: Appends a text and ends the answer.
    MESSAGE = auto()
    #: Like MESSAGE, with the summary of the answers built by the flow's definition.
    SUMMARY = auto()
    #: Replaces the whole answer with a text.
    OUTPUT = auto()
    #: Calls a function that returns an action or another route.
    TOOL = auto()
    #: Ends the flow; the model continues freely.
    NOOP = auto()


@runtime_checkable
class FlowState(Protocol):
    """Fields that the state of a run must have; `RequestState` has them, and custom classes can."""

    request_id: str
    current_question: Any
    pending_route: Any
    answers: Dict[str, str]
    data: Dict[str, Any]


@dataclass
class RequestState:
    """Default state of a run in a flow."""

    request_id: str
    #: Current question; None before and after the flow.
    current_question: Optional[FlowQuestion[Any]] = None
    #: Route to take at the next ForwardPass.
    pending_route: Optional[FlowRoute[Any]] = None
    #: Answers by name of the question.
    answers: Dict[str, str] = field(default_factory=dict)
    #: Data of the flow's functions.
    data: Dict[str, Any] = field(default_factory=dict)


if TYPE_CHECKING:
    TState = TypeVar("TState", bound=FlowState, default="RequestState")
else:
    TState = TypeVar("TState", bound=FlowState)

#: A FlowRoute, a FlowQuestion, a FlowDefinition, a text (a message), a function (a tool), or None.
RouteTarget = Any
#: A RouteTarget, or a function of the state that returns one.
RouteSpec = Any


@dataclass
class FlowRoute(Generic[TState]):
    """A route of a flow; created by `route_question`, `route_message` and so on."""

    kind: RouteKind
    target: Any = None
    message: Optional[str] = None
    callback: Optional[Callable[..., Any]] = None


def route_question(question: FlowQuestion[Any]) -> FlowRoute[Any]:
    """Returns a route that asks the question."""
    return FlowRoute(kind=RouteKind.QUESTION, target=question)


def route_message(text: str) -> FlowRoute[Any]:
    """Returns a route that appends the text and ends the answer."""
    return FlowRoute(kind=RouteKind.MESSAGE, message=text)


def route_output(text: str) -> FlowRoute[Any]:
    """Returns a route that replaces the whole answer with the text and ends it."""
    return FlowRoute(kind=RouteKind.OUTPUT, message=text)


def route_summary(message: Optional[str] = None) -> FlowRoute[Any]:
    """Returns a route that appends the summary of the flow's definition, or `message`, and ends the answer."""
    return FlowRoute(kind=RouteKind.SUMMARY, message=message)


def route_noop() -> FlowRoute[Any]:
    """Returns a route that ends the flow; the model continues freely."""
    return FlowRoute(kind=RouteKind.NOOP)


def route_tool(callback: Callable[..., Any]) -> FlowRoute[Any]:
    """Returns a route that calls `callback(actions, state, tokenizer)` or `callback(state)`, which returns an action or
    another route."""
    return FlowRoute(kind=RouteKind.TOOL, callback=callback)


def coerce_route(target: RouteTarget) -> FlowRoute[Any]:
    """Converts a target to a route. Raises ValueError for invalid targets."""
    if isinstance(target, FlowRoute):
        return target
    if isinstance(target, FlowQuestion):
        return route_question(target)
    if isinstance(target, FlowDefinition):
        return route_question(target.root)
    if isinstance(target, str):
        return route_message(target)
    if target is None:
        return route_noop()
    if callable(target):
        return route_tool(target)
    raise ValueError("a route target must be a route, a question, a text, a function or None, got %r" % (target,))


@dataclass(eq=False)
class FlowQuestion(Generic[TState]):
    """A question of a flow, with the routes of its answers."""

    #: Name under which the state stores the answer.
    name: str
    #: Prompt of the question, or a function of the state that returns it.
    prompt: Union[str, Callable[[Any], str]]
    #: Format of the answer.
    strategy: Any
    #: Text forced after an answer that is kept with its prompt.
    completion_text: Optional[str] = "\n"
    #: Text that is removed once the answer is complete.
    erase_mode: Union[EraseMode, str, None] = EraseMode.NONE
    #: Functions called with (state, answer).
    assignments: List[Callable[[Any, str], Any]] = field(default_factory=list)
    #: Routes by answer, in lower case.
    transitions: Dict[str, RouteSpec] = field(default_factory=dict)
    #: Functions that are called in order if neither a transition nor a default applies.
    branch_resolvers: List[Callable[[Any], RouteSpec]] = field(default_factory=list)
    #: Route of answers without a transition.
    default_route: Optional[RouteSpec] = None
    #: Function that answers from the state instead of the model.
    auto_answer_fn: Optional[Callable[[Any], Optional[str]]] = None
    #: True to take the most probable of the allowed tokens instead of drawing one.
    argmax_sampling: bool = False

    def on(self, answer: str, target: RouteSpec) -> FlowQuestion[TState]:
        """Sets the route of an answer, case-insensitively."""
        self.transitions[answer.lower()] = target
        return self

    def then(self, target: RouteSpec) -> FlowQuestion[TState]:
        """Sets the route of all other answers."""
        self.default_route = target
        return self

    def otherwise(self, target: RouteSpec) -> FlowQuestion[TState]:
        """Sets the route of all other answers."""
        return self.then(target)

    def assign(self, func: Callable[[Any, str], Any]) -> FlowQuestion[TState]:
        """Adds a function that is called as func(state, answer)."""
        self.assignments.append(func)
        return self

    def branch(self, resolver: Callable[[Any], RouteSpec]) -> FlowQuestion[TState]:
        """Adds resolver(state), which returns the route if neither `on` nor `then` applies. None selects the next resolver."""
        self.branch_resolvers.append(resolver)
        return self

    def with_auto_answer(self, func: Callable[[Any], Optional[str]]) -> FlowQuestion[TState]:
        """Sets func(state), which answers instead of the model; None or "" asks the model."""
        self.auto_answer_fn = func
        return self

    def resolve_route(self, state: Any, answer: Optional[str] = None) -> Optional[FlowRoute[Any]]:
        """Returns the route after an answer; None if the flow ends."""
        specs: List[RouteSpec] = [self.default_route]
        if answer is not None:
            by_answer = self.transitions.get(answer.lower(), self.transitions.get(answer.strip().lower()))
            specs.insert(0, by_answer)
        specs.extend(self.branch_resolvers)
        for spec in specs:
            while callable(spec):
                spec = spec(state)
            if spec is not None:
                return coerce_route(spec)
        return None


@dataclass(eq=False)
class FlowDefinition(Generic[TState]):
    """A named flow that begins with `root`; `summary_builder(state)` returns the text of `route_summary`."""

    name: str
    root: FlowQuestion[TState]
    summary_builder: Callable[[Any], str]

    def all_questions(self) -> List[FlowQuestion[Any]]:
        """Returns the questions that can be reached without calling a function."""
        found: List[FlowQuestion[Any]] = []
        pending: List[Any] = [self.root]
        while pending:
            target = pending.pop()
            if isinstance(target, FlowRoute):
                target = target.target
            elif isinstance(target, FlowDefinition):
                target = target.root
            if isinstance(target, FlowQuestion) and target not in found:
                found.append(target)
                pending.extend(target.transitions.values())
                pending.append(target.default_route)
        return found
