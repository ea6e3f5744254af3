"""Write mods for Thunder: code that steps into every token of a run.

    from thunder import mod, Added

    @mod
    def no_shouting(event, actions, tokenizer):
        if isinstance(event, Added) and "!" in event.text:
            return actions.backtrack(len(event.added_tokens), tokenizer.encode("."))

The same names can be imported from `quote_mod_sdk`. Standard library only; numpy is used when it is installed.
"""

from .actions import (
    ActionBuilder,
    AdjustedLogits,
    AdjustedPrefill,
    Backtrack,
    EmitError,
    ForceOutput,
    ForceTokens,
    InvalidActionError,
    ModAction,
    Noop,
    ToolCalls,
    for_event,
    validate_action,
)
from .conversation import get_conversation, get_schemas, tool_call_pairs
from .decorator import ModCallable, create_mod, mod
from .events import Added, ForwardPass, ModEvent, Prefilled, Sampled
from .logits import Logits, Tensor
from .serialization import serialize_mod
from .tokenizer import Tokenizer, tokenize

__all__ = [
    "ActionBuilder",
    "Added",
    "AdjustedLogits",
    "AdjustedPrefill",
    "Backtrack",
    "EmitError",
    "ForceOutput",
    "ForceTokens",
    "ForwardPass",
    "InvalidActionError",
    "Logits",
    "ModAction",
    "ModCallable",
    "ModEvent",
    "Noop",
    "Prefilled",
    "Sampled",
    "Tensor",
    "Tokenizer",
    "ToolCalls",
    "create_mod",
    "for_event",
    "get_conversation",
    "get_schemas",
    "mod",
    "serialize_mod",
    "tokenize",
    "tool_call_pairs",
    "validate_action",
]
