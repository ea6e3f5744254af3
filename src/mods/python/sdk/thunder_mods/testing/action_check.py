"""Validation of the values of an action, with the engine's messages."""

from __future__ import annotations

import math
from typing import Any, List, Optional

from ..actions import (
    AdjustedLogits,
    AdjustedPrefill,
    Backtrack,
    ForceOutput,
    ForceTokens,
    InvalidActionError,
    ModAction,
    ToolCalls,
    check_max_steps,
    check_nesting,
)


def action_error(action: ModAction, vocabulary: int, context: int) -> Optional[str]:
    """Returns the error of an invalid action; None for a valid one."""
    try:
        if isinstance(action, AdjustedPrefill):
            check_max_steps(action.max_steps)
        elif isinstance(action, ToolCalls):
            check_nesting(action.tool_calls)
    except InvalidActionError as error:
        return str(error)
    if isinstance(action, ForceTokens) and not action.tokens:
        return "ForceTokens needs at least one token"
    if isinstance(action, Backtrack) and action.n < 1:
        return "Backtrack needs `n` >= 1, got %d; use ForceTokens to append without removing" % action.n
    if isinstance(action, AdjustedPrefill):
        if not action.tokens:
            return "AdjustedPrefill needs at least one token"
        if len(action.tokens) >= context:
            return "AdjustedPrefill has %d tokens; it must have fewer than the %d tokens of a slot's context" % (len(action.tokens), context)
    if isinstance(action, AdjustedLogits):
        temperature = action.token_temp
        if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
            return "`token_temp` must be a number of 0 or more, got %s" % temperature
        outside = [token for edits in (action.set, action.add) for token in edits or () if not 0 <= token < vocabulary]
        return _unknown_token_error(outside[0], vocabulary) if outside else None
    if isinstance(action, ToolCalls):
        return _tool_calls_error(action.tool_calls)
    if isinstance(action, (Backtrack, ForceOutput, ForceTokens)) and len(action.tokens or ()) > context:
        shape = "%s has %d tokens; it must have at most the %d tokens of a slot's context"
        return shape % (type(action).__name__, len(action.tokens or ()), context)
    if isinstance(action, (AdjustedPrefill, Backtrack, ForceOutput, ForceTokens)):
        for token in action.tokens or ():
            if not 0 <= token < vocabulary:
                return _unknown_token_error(token, vocabulary)
    return None


def tool_calls_of(payload: Any) -> List[Any]:
    """Returns the calls of a payload: one call, a list of calls, or a message that has calls."""
    if isinstance(payload, dict) and "tool_calls" in payload:
        payload = payload["tool_calls"]
    return list(payload) if isinstance(payload, (list, tuple)) else [payload]


def _tool_calls_error(payload: Any) -> Optional[str]:
    calls = tool_calls_of(payload)
    if not calls:
        return "ToolCalls needs at least one tool call"
    for index, call in enumerate(calls):
        nested = call.get("function") if isinstance(call, dict) else None
        function = nested if isinstance(nested, dict) else call
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            shape = '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
            return "ToolCalls: call %d has no function name; a call must have the form %s" % (index, shape)
    return None


def _unknown_token_error(token: int, vocabulary: int) -> str:
    return "token %d is not in the vocabulary; ids must be from 0 to %d" % (token, vocabulary - 1)
