"""What happened in a run of the testing engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple, Type, TypeVar, Union

from ..actions import ModAction, Noop

A = TypeVar("A", bound=ModAction)


@dataclass
class Event:
    """An event of the run."""

    #: Prefilled, ForwardPass, Sampled or Added.
    kind: str
    #: 0, 1, 2 … over all events.
    order: int
    #: 0 for Prefilled; each step appends one drawn token, or one forced list.
    step: int
    #: Index in the sequence of the first of `tokens`, or of the next token.
    position: int
    #: Prefilled: the prompt. Sampled: the drawn token. Added: the added ones. ForwardPass: none.
    tokens: List[int]
    #: Their text.
    text: str
    #: Added: whether a mod appended them.
    forced: bool = False


@dataclass
class Call:
    """A call of a mod."""

    mod: str
    event: Event
    action: ModAction
    #: What the mod raised, or what was wrong with its action; the action is then Noop.
    exception: Optional[BaseException] = None
    #: What it printed and logged: (level, message).
    logs: List[Tuple[str, str]] = field(default_factory=list)
    #: Whether a mod before it had decided the event.
    superseded: bool = False
    #: Backtrack: tokens that left the sequence, and whether it asked for more.
    removed: Optional[int] = None
    clamped: bool = False
    #: AdjustedLogits: the logits as it left them, one per token.
    logits: Optional[List[float]] = None


@dataclass
class Result:
    """A run that has ended."""

    #: The answer, without control tokens and without the stop string.
    text: str
    #: Token ids of prompt and answer.
    prompt_tokens: List[int]
    tokens: List[int]
    #: stop, length, tool_calls or error.
    finish_reason: str
    #: Why it ended, where that is not plain.
    message: Optional[str]
    #: The tool calls that ended it, as a list in OpenAI's shape.
    tool_calls: Optional[List[Any]]
    events: List[Event]
    calls: List[Call]
    #: What a client of a stream got: a text, or how many characters it is to take back.
    sent: List[Union[str, int]]

    def actions(self, kind: Union[Type[A], str, None] = None, mod: Optional[str] = None) -> List[Any]:
        """The actions other than Noop, in order; those of one kind (a class or its name), or of one mod."""
        found = [call.action for call in self.calls if mod in (None, call.mod) and not isinstance(call.action, Noop)]
        if kind is None:
            return found
        name = kind if isinstance(kind, str) else kind.__name__
        return [action for action in found if type(action).__name__ == name]

    def logs(self, mod: Optional[str] = None) -> List[str]:
        """What was printed and logged, in order."""
        return [text for call in self.calls if mod in (None, call.mod) for _, text in call.logs]

    def exceptions(self) -> List[BaseException]:
        """What the mods raised, and what was wrong with their actions."""
        return [call.exception for call in self.calls if call.exception is not None]

    def check(self) -> Result:
        """This result; raises the first exception of a mod."""
        for exception in self.exceptions():
            raise exception
        return self

    def seen(self) -> str:
        """What a client of a stream has in the end."""
        text = ""
        for item in self.sent:
            text = text + item if isinstance(item, str) else text[: len(text) - item]
        return text

    def summary(self) -> Dict[str, Any]:
        """Text, reason and the names of the actions, for a comparison in one line."""
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "actions": [type(action).__name__ for action in self.actions()],
        }
