"""Actions of mods, and their builder."""

from __future__ import annotations

import math
import operator
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Type, Union

from .events import Added, ForwardPass, InvalidActionError, ModEvent, Prefilled, Sampled, check_count
from .logits import Logits, top_k_logprob


#: Maximum of `max_steps`.
_MAX_STEPS = 2**31 - 1
#: Maximum depth of lists and dictionaries in tool calls.
_MAX_NESTING = 100


class ModAction:
    """Base class of the actions."""

    def __repr__(self) -> str:
        fields = ", ".join("%s=%r" % field for field in vars(self).items() if field[0] not in ("logits", "_before"))
        return "%s(%s)" % (type(self).__name__, fields)


class Noop(ModAction):
    """Continue without a change."""


class AdjustedPrefill(ModAction):
    """Replace the prompt, and optionally the limit of generated tokens."""

    def __init__(self, tokens: Iterable[int], max_steps: Optional[int] = None) -> None:
        self.tokens = list(tokens)
        self.max_steps = max_steps


class ForceTokens(ModAction):
    """Append these tokens."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: List[int] = list(tokens)


class ForceOutput(ModAction):
    """End the run with these tokens as the answer."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: List[int] = list(tokens)


class Backtrack(ModAction):
    """Remove the last n generated tokens, then append `tokens`."""

    def __init__(self, n: int, tokens: Optional[Iterable[int]] = None) -> None:
        self.n = int(n)
        self.tokens: Optional[List[int]] = list(tokens) if tokens is not None else None


class AdjustedLogits(ModAction):
    """Edit the logits of this step: either all of them, as float32 of shape (1, vocabulary), or sparse edits `set` or
    `add` {token: value}, applied to the logits of the event. -inf bans a token. `token_temp` is the temperature of this
    step only; 0 takes the most probable token."""

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
        """Returns (log-probabilities, token ids) of the k most probable tokens after the edit, each of shape (1, k)."""
        if self.logits is not None or self._before is None:
            return top_k_logprob(self.logits, k)
        edited = self._before.copy()
        for token, value in (self.set or {}).items():
            edited[token] = value
        for token, value in (self.add or {}).items():
            edited[token] += value
        return top_k_logprob(edited, k)


class ToolCalls(ModAction):
    """End the run with these tool calls: one OpenAI tool call, a list of them, or a message that has them. Generated text
    is retracted."""

    def __init__(self, tool_calls: Any) -> None:
        self.tool_calls = tool_calls


class EmitError(ModAction):
    """End the run with an error. Text that was held back is not sent."""

    def __init__(self, err_str: str) -> None:
        self.err_str = err_str or "the mod ended the run without a message"


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
        raise InvalidActionError("%s takes token ids, not text; use tokenizer.encode(text)" % method)
    try:
        return [int(token) for token in tokens]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidActionError("%s takes a list of token ids: %s" % (method, error)) from None


def check_max_steps(max_steps: Any, name: str = "max_steps") -> Optional[int]:
    """Returns the limit of tokens of a prefill as an int or None; None and 0 keep the limit. Raises InvalidActionError if it
    is not one."""
    if max_steps is None:
        return None
    try:
        steps = -1 if isinstance(max_steps, bool) else operator.index(max_steps)
    except TypeError:
        steps = -1
    if not 0 <= steps <= _MAX_STEPS:
        raise InvalidActionError("`%s` must be None or an integer from 0 to %d, got %.40r" % (name, _MAX_STEPS, max_steps))
    return steps


def check_nesting(tool_calls: Any) -> None:
    """Raises InvalidActionError if the tool calls are nested too deeply for the server's JSON parser."""
    level: List[Any] = [tool_calls]
    for _ in range(_MAX_NESTING):
        # A value that is referenced several times is visited once per level.
        nested: Dict[int, Any] = {}
        for value in level:
            if isinstance(value, dict):
                value = value.values()
            elif not isinstance(value, (list, tuple)):
                continue
            nested.update((id(item), item) for item in value if isinstance(item, (dict, list, tuple)))
        if not nested:
            return
        level = list(nested.values())
    raise InvalidActionError("tool calls must not be nested more than %d levels deep" % _MAX_NESTING)


class ActionBuilder:
    """Builder of actions for one event.

    Each method raises InvalidActionError if the event does not permit its action. Tokens are ids, not text.
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
        """Continues without a change."""
        self._permit(Noop, "noop")
        return Noop()

    def adjust_prefill(
        self, tokens: Iterable[int], *, max_tokens: Optional[int] = None, max_steps: Optional[int] = None
    ) -> AdjustedPrefill:
        """Prefilled: replaces the prompt with these tokens; `max_tokens` is the new limit of generated tokens, and None or 0
        keeps the limit. `max_steps` is Quote's name for it."""
        self._permit(AdjustedPrefill, "adjust_prefill")
        if max_tokens is not None and max_steps is not None:
            raise InvalidActionError("adjust_prefill takes either max_tokens or max_steps, not both")
        limit, name = (max_steps, "max_steps") if max_tokens is None else (max_tokens, "max_tokens")
        if isinstance(limit, float) and math.isfinite(limit):
            limit = int(limit)
        return AdjustedPrefill(_token_ids(tokens, "adjust_prefill"), check_max_steps(limit, name))

    def adjust_logits(
        self,
        logits: Any = None,
        token_temp: Optional[float] = None,
        *,
        set: Optional[Mapping[int, float]] = None,
        add: Optional[Mapping[int, float]] = None,
    ) -> AdjustedLogits:
        """ForwardPass: replaces the logits, or applies the sparse edits `set` or `add` {token: value}. `logits` are float32
        of shape (1, vocabulary) or (vocabulary,); the default is `event.logits` with its in-place changes. -inf bans a
        token. `token_temp` is the temperature of this step only; 0 takes the most probable token."""
        self._permit(AdjustedLogits, "adjust_logits")
        if logits is not None and (set is not None or add is not None):
            raise InvalidActionError("adjust_logits takes either logits or sparse edits, not both")
        if set is not None and add is not None:
            raise InvalidActionError("adjust_logits takes either set or add, not both")
        before = getattr(self._event, "logits", None)
        if logits is None and set is None and add is None:
            logits = before
        if token_temp is not None and not 0 <= token_temp < math.inf:
            raise InvalidActionError("`token_temp` must be a number of 0 or more, got %s" % token_temp)
        action = AdjustedLogits(logits, None if token_temp is None else float(token_temp), set, add)
        action._before = before if isinstance(before, Logits) else None
        return action

    def force_tokens(self, tokens: Iterable[int]) -> ForceTokens:
        """Appends these tokens: instead of sampling (ForwardPass), instead of the drawn token (Sampled), or after the
        added tokens (Added). An end-of-generation token in the list ends the run."""
        self._permit(ForceTokens, "force_tokens")
        return ForceTokens(_token_ids(tokens, "force_tokens"))

    def backtrack(self, steps: int, tokens: Optional[Iterable[int]] = None) -> Backtrack:
        """Removes the last `steps` generated tokens, then appends `tokens`. At Sampled and Added, `steps` includes the
        drawn or just-added token."""
        self._permit(Backtrack, "backtrack")
        count = check_count(steps, "`steps` of backtrack must be an integer of 1 or more", 1, "; use force_tokens to append without removing")
        return Backtrack(count, None if tokens is None else _token_ids(tokens, "backtrack"))

    def force_output(self, tokens: Iterable[int]) -> ForceOutput:
        """Ends the run with these tokens as the answer; they replace the generated tokens."""
        self._permit(ForceOutput, "force_output")
        return ForceOutput(_token_ids(tokens, "force_output"))

    def tool_calls(self, payload: Union[Mapping[str, Any], Sequence[Mapping[str, Any]]]) -> ToolCalls:
        """Ends the run with these tool calls: one OpenAI tool call, a list of them, or a message that has them; see
        `tool_call`. Generated text is retracted."""
        self._permit(ToolCalls, "tool_calls")
        check_nesting(payload)
        return ToolCalls(payload)

    def emit_error(self, err_str: str) -> EmitError:
        """Ends the run with an error. Text that was held back is not sent."""
        self._permit(EmitError, "emit_error")
        return EmitError(str(err_str))


def for_event(event: ModEvent) -> ActionBuilder:
    """Returns the action builder of the event."""
    return ActionBuilder(event)


def validate_action(event: ModEvent, action: Any) -> ModAction:
    """Returns the action, or Noop for None. Raises InvalidActionError if it is not an action, or if the event does not
    permit it."""
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
        "a mod must return an action or None, got %s; use the builder, e.g. actions.noop()" % type(action).__name__
    )
