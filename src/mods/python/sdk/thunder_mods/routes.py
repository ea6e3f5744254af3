"""Where a flow goes: its questions, and what follows an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Callable, Dict, Generic, List, Optional, Protocol, Union, runtime_checkable

if TYPE_CHECKING:
    # Type checkers bring it along; it knows defaults, so that a flow whose state nobody names has the usual one.
    from typing_extensions import TypeVar
else:
    from typing import TypeVar

from .asking import EraseMode


class RouteKind(Enum):
    """What a route does."""

    #: Asks another question.
    QUESTION = auto()
    #: Writes a text after what stands there, and ends the answer.
    MESSAGE = auto()
    #: As MESSAGE, with the text that the flow's definition makes of the answers.
    SUMMARY = auto()
    #: Makes a text the whole answer.
    OUTPUT = auto()
    #: Calls a function for an action.
    TOOL = auto()
    #: Ends the flow; the model goes on by itself.
    NOOP = auto()


@runtime_checkable
class FlowState(Protocol):
    """What a run's state needs to have; `RequestState` is one, and any class of yours can be."""

    request_id: str
    current_question: Any
    pending_route: Any
    answers: Dict[str, str]
    data: Dict[str, Any]


@dataclass
class RequestState:
    """The state of a run where a flow says nothing else."""

    request_id: str
    #: The question under way, None before and after.
    current_question: Optional[FlowQuestion[Any]] = None
    #: A route to take at the next ForwardPass.
    pending_route: Optional[FlowRoute[Any]] = None
    #: Answers by the question's name.
    answers: Dict[str, str] = field(default_factory=dict)
    #: Whatever the flow's functions want to keep.
    data: Dict[str, Any] = field(default_factory=dict)


if TYPE_CHECKING:
    TState = TypeVar("TState", bound=FlowState, default="RequestState")
else:
    TState = TypeVar("TState", bound=FlowState)

#: A FlowRoute, a FlowQuestion, a FlowDefinition, a text (a message), a function (a tool), or None.
RouteTarget = Any
#: A RouteTarget, or a function of the state that makes one.
RouteSpec = Any


@dataclass
class FlowRoute(Generic[TState]):
    """A step of a flow; made by `route_question`, `route_message` and so on."""

    kind: RouteKind
    target: Any = None
    message: Optional[str] = None
    callback: Optional[Callable[..., Any]] = None


def route_question(question: FlowQuestion[Any]) -> FlowRoute[Any]:
    """Asks the question."""
    return FlowRoute(kind=RouteKind.QUESTION, target=question)


def route_message(text: str) -> FlowRoute[Any]:
    """Writes the text after what stands there, and ends the answer."""
    return FlowRoute(kind=RouteKind.MESSAGE, message=text)


def route_output(text: str) -> FlowRoute[Any]:
    """Makes the text the whole answer, which ends with it."""
    return FlowRoute(kind=RouteKind.OUTPUT, message=text)


def route_summary(message: Optional[str] = None) -> FlowRoute[Any]:
    """Writes what the flow's definition makes of the answers, else `message`, and ends the answer."""
    return FlowRoute(kind=RouteKind.SUMMARY, message=message)


def route_noop() -> FlowRoute[Any]:
    """Ends the flow; the model goes on by itself."""
    return FlowRoute(kind=RouteKind.NOOP)


def route_tool(callback: Callable[..., Any]) -> FlowRoute[Any]:
    """Calls `callback(actions, state, tokenizer)`, or `callback(state)`, which answers with an action or with another
    route."""
    return FlowRoute(kind=RouteKind.TOOL, callback=callback)


def coerce_route(target: RouteTarget) -> FlowRoute[Any]:
    """The route that a target stands for. Raises ValueError where it is none."""
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
    raise ValueError("a flow goes on with a route, a question, a text or a function, not with %r" % (target,))


@dataclass(eq=False)
class FlowQuestion(Generic[TState]):
    """A question of a flow, and where its answers lead."""

    #: Its answers are kept in the state under this name.
    name: str
    #: What the model reads before it answers; or a function of the state that makes it.
    prompt: Union[str, Callable[[Any], str]]
    #: The form of the answer.
    strategy: Any
    #: Forced after an answer that stays with its prompt.
    completion_text: Optional[str] = "\n"
    #: What is taken back once the answer is there.
    erase_mode: Union[EraseMode, str, None] = EraseMode.NONE
    #: Called with (state, answer).
    assignments: List[Callable[[Any, str], Any]] = field(default_factory=list)
    #: By answer, in lower case.
    transitions: Dict[str, RouteSpec] = field(default_factory=dict)
    #: Asked in order where neither a transition nor a default applies.
    branch_resolvers: List[Callable[[Any], RouteSpec]] = field(default_factory=list)
    #: Where answers without a transition lead.
    default_route: Optional[RouteSpec] = None
    #: Makes an answer of the state, so that the model need not be asked.
    auto_answer_fn: Optional[Callable[[Any], Optional[str]]] = None
    #: Takes the most probable of the allowed tokens instead of drawing one.
    argmax_sampling: bool = False

    def on(self, answer: str, target: RouteSpec) -> FlowQuestion[TState]:
        """Where this answer leads, whatever its case."""
        self.transitions[answer.lower()] = target
        return self

    def then(self, target: RouteSpec) -> FlowQuestion[TState]:
        """Where all other answers lead."""
        self.default_route = target
        return self

    def otherwise(self, target: RouteSpec) -> FlowQuestion[TState]:
        """Where all other answers lead."""
        return self.then(target)

    def assign(self, func: Callable[[Any, str], Any]) -> FlowQuestion[TState]:
        """Has func(state, answer) called with the answer."""
        self.assignments.append(func)
        return self

    def branch(self, resolver: Callable[[Any], RouteSpec]) -> FlowQuestion[TState]:
        """Has resolver(state) say where to go on, where neither `on` nor `then` does; None passes to the next."""
        self.branch_resolvers.append(resolver)
        return self

    def with_auto_answer(self, func: Callable[[Any], Optional[str]]) -> FlowQuestion[TState]:
        """Has func(state) answer instead of the model; None or "" asks the model."""
        self.auto_answer_fn = func
        return self

    def resolve_route(self, state: Any, answer: Optional[str] = None) -> Optional[FlowRoute[Any]]:
        """The route after this answer; None where the flow ends."""
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
    """A named flow that begins with `root`; `summary_builder(state)` makes the text of `route_summary`."""

    name: str
    root: FlowQuestion[TState]
    summary_builder: Callable[[Any], str]

    def all_questions(self) -> List[FlowQuestion[Any]]:
        """The questions that can be reached without asking a function."""
        found: List[FlowQuestion[Any]] = []
        waiting: List[Any] = [self.root]
        while waiting:
            target = waiting.pop()
            if isinstance(target, FlowRoute):
                target = target.target
            elif isinstance(target, FlowDefinition):
                target = target.root
            if isinstance(target, FlowQuestion) and target not in found:
                found.append(target)
                waiting.extend(target.transitions.values())
                waiting.append(target.default_route)
        return found
