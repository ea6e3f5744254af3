"""What a mod can answer with, and the builder that makes it."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Type, Union

from .events import Added, ForwardPass, ModEvent, Prefilled, Sampled
from .logits import Logits, top_k_logprob


class InvalidActionError(ValueError):
    """The event does not permit the action, or the action's values make no sense."""


class ModAction:
    """Base class of the actions."""

    def __repr__(self) -> str:
        fields = ", ".join("%s=%r" % field for field in vars(self).items() if field[0] not in ("logits", "_before"))
        return "%s(%s)" % (type(self).__name__, fields)


class Noop(ModAction):
    """Go on."""


class AdjustedPrefill(ModAction):
    """Replace the prompt, optionally the limit of generated tokens."""

    def __init__(self, tokens: Iterable[int], max_steps: Optional[int] = None) -> None:
        self.tokens = list(tokens)
        self.max_steps = max_steps


class ForceTokens(ModAction):
    """Append these tokens."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: List[int] = list(tokens)


class ForceOutput(ModAction):
    """The answer is these tokens; the run ends."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: List[int] = list(tokens)


class Backtrack(ModAction):
    """Remove the last n generated tokens, then append `tokens`."""

    def __init__(self, n: int, tokens: Optional[Iterable[int]] = None) -> None:
        self.n = int(n)
        self.tokens: Optional[List[int]] = list(tokens) if tokens is not None else None


class AdjustedLogits(ModAction):
    """Edit the logits of this step: all of them, float32 of shape (1, vocabulary), or as sparse edits `set` or `add`
    {token: value}, made to the logits as they came. -inf bans a token. `token_temp` is the temperature of this one
    draw, 0 = argmax."""

    def __init__(
        self,
        logits: Any = None,
        token_temp: Optional[float] = None,
        set: Optional[Mapping[int, float]] = None,
        add: Optional[Mapping[int, float]] = None,
    ) -> None:
        self.logits = logits
        self.token_temp = token_temp
        self.set = set
        self.add = add
        self._before: Any = None

    def top_k_logprob(self, k: int) -> Tuple[Any, Any]:
        """(log-probabilities, token ids) of the k most probable tokens after the edit, each of shape (1, k)."""
        if self.logits is not None or self._before is None:
            return top_k_logprob(self.logits, k)
        edited = self._before.copy()
        for token, value in (self.set or {}).items():
            edited[token] = value
        for token, value in (self.add or {}).items():
            edited[token] += value
        return top_k_logprob(edited, k)


class ToolCalls(ModAction):
    """The run ends with these tool calls: one OpenAI tool call or a list of them."""

    def __init__(self, tool_calls: Any) -> None:
        self.tool_calls = tool_calls


class EmitError(ModAction):
    """The run ends with an error."""

    def __init__(self, err_str: str) -> None:
        self.err_str = err_str


_Events = Tuple[Type[ModEvent], ...]
_ALL: _Events = (Prefilled, ForwardPass, Sampled, Added)
_GENERATING: _Events = (ForwardPass, Sampled, Added)
_PERMITTED: Dict[Type[ModAction], _Events] = {
    Noop: _ALL,
    AdjustedPrefill: (Prefilled,),
    AdjustedLogits: (ForwardPass,),
    ForceTokens: _GENERATING,
    Backtrack: _GENERATING,
    ForceOutput: _ALL,
    ToolCalls: _ALL,
    EmitError: _ALL,
}


def _token_ids(tokens: Iterable[int], method: str) -> List[int]:
    if isinstance(tokens, (str, bytes)):
        raise InvalidActionError("%s takes token ids, not text; tokenizer.encode(text) makes them" % method)
    try:
        return [int(token) for token in tokens]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidActionError("%s takes a list of token ids: %s" % (method, error)) from None


class ActionBuilder:
    """Makes actions for one event.

    Each method raises InvalidActionError where the event does not permit its action. Tokens are ids, not text.
    """

    def __init__(self, event: ModEvent) -> None:
        self._event = event

    def _permit(self, action: Type[ModAction], method: str) -> None:
        permitted = _PERMITTED[action]
        if not isinstance(self._event, permitted):
            raise InvalidActionError(
                "Action '%s' not permitted for event type %s; it is permitted for %s"
                % (method, type(self._event).__name__, ", ".join(cls.__name__ for cls in permitted))
            )

    def noop(self) -> Noop:
        """Go on."""
        self._permit(Noop, "noop")
        return Noop()

    def adjust_prefill(self, tokens: Iterable[int], *, max_steps: Optional[int] = None) -> AdjustedPrefill:
        """Prefilled: these tokens are the prompt; `max_steps` is the new limit of generated tokens."""
        self._permit(AdjustedPrefill, "adjust_prefill")
        return AdjustedPrefill(_token_ids(tokens, "adjust_prefill"), None if max_steps is None else int(max_steps))

    def adjust_logits(
        self,
        logits: Any = None,
        token_temp: Optional[float] = None,
        *,
        set: Optional[Mapping[int, float]] = None,
        add: Optional[Mapping[int, float]] = None,
    ) -> AdjustedLogits:
        """ForwardPass: new logits, float32 of shape (1, vocabulary) or (vocabulary,), by default `event.logits` as
        written to in place; or the sparse edits `set` or `add` {token: value}. -inf bans a token. `token_temp` is the
        temperature of this one draw, 0 = argmax."""
        self._permit(AdjustedLogits, "adjust_logits")
        if logits is not None and (set is not None or add is not None):
            raise InvalidActionError("adjust_logits takes logits, or sparse edits, not both")
        if set is not None and add is not None:
            raise InvalidActionError("adjust_logits takes set or add, not both")
        before = getattr(self._event, "logits", None)
        if logits is None and set is None and add is None:
            logits = before
        if token_temp is not None and not 0 <= token_temp < math.inf:
            raise InvalidActionError("token_temp must be 0 or more, not %s" % token_temp)
        action = AdjustedLogits(logits, None if token_temp is None else float(token_temp), set, add)
        action._before = before if isinstance(before, Logits) else None
        return action

    def force_tokens(self, tokens: Iterable[int]) -> ForceTokens:
        """Append these tokens: instead of sampling (ForwardPass), instead of the drawn token (Sampled), or after the
        added one (Added). An end-of-generation token in the list ends the run."""
        self._permit(ForceTokens, "force_tokens")
        return ForceTokens(_token_ids(tokens, "force_tokens"))

    def backtrack(self, steps: int, tokens: Optional[Iterable[int]] = None) -> Backtrack:
        """Remove the last `steps` generated tokens, then append `tokens`. At Sampled and Added, `steps` counts the
        drawn or just-added token."""
        self._permit(Backtrack, "backtrack")
        if int(steps) < 0:
            raise InvalidActionError("backtrack takes a number of tokens to remove, not %s" % steps)
        return Backtrack(steps, None if tokens is None else _token_ids(tokens, "backtrack"))

    def force_output(self, tokens: Iterable[int]) -> ForceOutput:
        """The answer is these tokens, replacing what was generated; the run ends."""
        self._permit(ForceOutput, "force_output")
        return ForceOutput(_token_ids(tokens, "force_output"))

    def tool_calls(self, payload: Union[Mapping[str, Any], Sequence[Mapping[str, Any]]]) -> ToolCalls:
        """The run ends with these tool calls: one OpenAI tool call or a list of them, as `tool_call` makes them."""
        self._permit(ToolCalls, "tool_calls")
        return ToolCalls(payload)

    def emit_error(self, err_str: str) -> EmitError:
        """The run ends with an error."""
        self._permit(EmitError, "emit_error")
        return EmitError(str(err_str))


def for_event(event: ModEvent) -> ActionBuilder:
    """A builder bound to the event."""
    return ActionBuilder(event)


def validate_action(event: ModEvent, action: Any) -> ModAction:
    """The action, Noop for None; raises when it is none, or the event does not permit it."""
    if action is None:
        return Noop()
    for cls, permitted in _PERMITTED.items():
        if isinstance(action, cls):
            if isinstance(event, permitted):
                return action
            raise InvalidActionError(
                "Action '%s' not permitted for event type %s" % (cls.__name__, type(event).__name__)
            )
    raise InvalidActionError(
        "a mod returns an action or None, not %s; make one with the builder, e.g. actions.noop()" % type(action).__name__
    )
