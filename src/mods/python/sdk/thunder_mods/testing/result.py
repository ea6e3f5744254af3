"""Result of a run of the testing engine."""

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
    #: Number of the event: 0, 1, 2 …
    order: int
    #: Step: 0 for Prefilled; each step appends one drawn token or one forced list.
    step: int
    #: Index of the first of `tokens` in the sequence, or of the next token.
    position: int
    #: Prefilled: the prompt. Sampled: the drawn token. Added: the added tokens. ForwardPass: none.
    tokens: List[int]
    #: Text of `tokens`.
    text: str
    #: Added: True if a mod appended them.
    forced: bool = False


@dataclass
class Call:
    """A call of a mod."""

    mod: str
    event: Event
    action: ModAction
    #: Exception of the mod, or error of its action. The action is then Noop.
    exception: Optional[BaseException] = None
    #: Printed and logged lines: (level, message).
    logs: List[Tuple[str, str]] = field(default_factory=list)
    #: True if the action of an earlier mod took effect instead.
    superseded: bool = False
    #: Backtrack: number of removed tokens, and True if the mod requested more.
    removed: Optional[int] = None
    clamped: bool = False
    #: AdjustedLogits: logits after the edit, one per token.
    logits: Optional[List[float]] = None


@dataclass
class Result:
    """A run that has ended."""

    #: Answer, without control tokens and without the stop string.
    text: str
    #: Token ids of prompt and answer.
    prompt_tokens: List[int]
    tokens: List[int]
    #: stop, length, tool_calls or error.
    finish_reason: str
    #: Message about the end of the run, if any.
    message: Optional[str]
    #: Tool calls that ended the run, in OpenAI's format.
    tool_calls: Optional[List[Any]]
    events: List[Event]
    calls: List[Call]
    #: Messages to a streaming client: a text, or a number of characters to remove.
    sent: List[Union[str, int]]

    def actions(self, kind: Union[Type[A], str, None] = None, mod: Optional[str] = None) -> List[Any]:
        """Returns the actions other than Noop, in order; optionally of one kind (a class or its name), or of one mod."""
        found = [call.action for call in self.calls if mod in (None, call.mod) and not isinstance(call.action, Noop)]
        if kind is None:
            return found
        name = kind if isinstance(kind, str) else kind.__name__
        return [action for action in found if type(action).__name__ == name]

    def logs(self, mod: Optional[str] = None) -> List[str]:
        """Returns the printed and logged lines, in order."""
        return [text for call in self.calls if mod in (None, call.mod) for _, text in call.logs]

    def exceptions(self) -> List[BaseException]:
        """Returns the exceptions of the mods, and the errors of their actions."""
        return [call.exception for call in self.calls if call.exception is not None]

    def check(self) -> Result:
        """Returns this result; raises the first exception of a mod."""
        for exception in self.exceptions():
            raise exception
        return self

    def seen(self) -> str:
        """Returns the final text of a streaming client."""
        text = ""
        for item in self.sent:
            text = text + item if isinstance(item, str) else text[: len(text) - item]
        return text

    def summary(self) -> Dict[str, Any]:
        """Returns text, finish reason and names of the actions, for short comparisons."""
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "actions": [type(action).__name__ for action in self.actions()],
        }
