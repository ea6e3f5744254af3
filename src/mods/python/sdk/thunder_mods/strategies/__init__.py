"""Constrained answers: the tokens that may be drawn next, and the end of the answer.

    ChoicesStrat(["yes", "no"])                          one of several texts
    UntilStrat("<q>", UntilEndType.TAG, "</q>")          any text between two tags
    CharsStrat(CharsMode.NUMERIC, stop=4, min=4)         characters of one kind
    ListStrat(CharsStrat(CharsMode.STRING, stop='"'), open="[", close="]", wrap='"')   several of them

They edit the logits, so that tokens that cannot continue the answer are never drawn. Pass them to
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
