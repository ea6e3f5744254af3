"""Answers of a certain form: what the model may draw next, and when the answer is complete.

    ChoicesStrat(["yes", "no"])                          one of several texts
    UntilStrat("<q>", UntilEndType.TAG, "</q>")          any text between two tags
    CharsStrat(CharsMode.NUMERIC, stop=4, min=4)         characters of one kind
    ListStrat(CharsStrat(CharsMode.STRING, stop='"'), open="[", close="]", wrap='"')   several of them

The model is held to them by its logits: tokens that cannot go on with the answer are never drawn. Give them to
`thunder_mods.self_prompt.SelfPrompt` or to a `thunder_mods.flow.FlowQuestion`.
"""

from .base import RuntimeState, Strategy, StrategyConstructor
from .primitives import CharsMode, UntilEndType
from .strategy_constructor import CharsStrat, ChoicesStrat, ListStrat, UntilStrat

__all__ = [
    "CharsMode",
    "CharsStrat",
    "ChoicesStrat",
    "ListStrat",
    "RuntimeState",
    "Strategy",
    "StrategyConstructor",
    "UntilEndType",
    "UntilStrat",
]
