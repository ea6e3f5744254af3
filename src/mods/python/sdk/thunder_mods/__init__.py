"""SDK for Thunder mods: code that can observe and change every token of a run.

    from thunder_mods import mod, Added

    @mod
    def no_shouting(event, actions, tokenizer):
        if isinstance(event, Added) and "!" in event.text:
            return actions.backtrack(len(event.added_tokens), tokenizer.encode("."))

`strategies`, `self_prompt` and `flow` make the model answer questions in a given format; `testing` runs a mod without
a server. The same names can be imported from `thunder` and `quote_mod_sdk`. The SDK needs only the standard library, and
uses numpy if it is installed.
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
from .active_question import EraseMode
from .conversation import get_conversation, get_schemas, last_message, text_of, tool_call, tool_call_pairs
from .decorator import ModCallable, create_mod, mod
from .events import Added, ContextInfo, ForwardPass, ModEvent, Prefilled, Sampled
from .flow import FlowEngine, FlowQuestion
from .logits import Logits, Tensor
from .self_prompt import SelfPrompt, self_prompt_mod
from .serialization import serialize_mod
from .strategies import CharsMode, CharsStrat, ChoicesStrat, ListStrat, UntilEndType, UntilStrat
from .tokenizer import Tokenizer, tokenize

__all__ = [
    "ActionBuilder",
    "Added",
    "AdjustedLogits",
    "AdjustedPrefill",
    "Backtrack",
    "CharsMode",
    "CharsStrat",
    "ChoicesStrat",
    "ContextInfo",
    "EmitError",
    "EraseMode",
    "FlowEngine",
    "FlowQuestion",
    "ForceOutput",
    "ForceTokens",
    "ForwardPass",
    "InvalidActionError",
    "ListStrat",
    "Logits",
    "ModAction",
    "ModCallable",
    "ModEvent",
    "Noop",
    "Prefilled",
    "Sampled",
    "SelfPrompt",
    "Tensor",
    "Tokenizer",
    "ToolCalls",
    "UntilEndType",
    "UntilStrat",
    "create_mod",
    "for_event",
    "get_conversation",
    "get_schemas",
    "last_message",
    "mod",
    "self_prompt_mod",
    "serialize_mod",
    "text_of",
    "tokenize",
    "tool_call",
    "tool_call_pairs",
    "validate_action",
]
