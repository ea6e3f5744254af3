"""Constructors of strategies, without a tokenizer."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Union

from .base import Strategy, StrategyConstructor
from .primitives import (
    CharsMode,
    CharsStrategy,
    ChoicesStrategy,
    LanguageStrategy,
    ListStrategy,
    UntilEndType,
    UntilStrategy,
)
from .sequence import SequenceStrategy

__all__ = ["CharsMode", "CharsStrat", "ChoicesStrat", "ListStrat", "StrategyConstructor", "UntilEndType", "UntilStrat"]


class _WithRepr:
    def __repr__(self) -> str:
        fields = ("%s=%r" % field for field in vars(self).items() if field[1] is not None)
        return "%s(%s)" % (type(self).__name__, ", ".join(fields))


class ChoicesStrat(_WithRepr, StrategyConstructor):
    """Exactly one of `choices`. If one begins with another (`no`, `not yet`), the model may continue after the shorter one
    or end the answer with an end-of-generation token."""

    def __init__(self, choices: List[str]) -> None:
        self.choices = list(choices)

    def into_strategy(self, tokenizer: Any = None) -> ChoicesStrategy:
        """Returns the strategy."""
        return ChoicesStrategy(self.choices)


class UntilStrat(_WithRepr, StrategyConstructor):
    """`start`, then any text, up to and including `end`; both are part of the answer.

    end_type: TAG ends at the whole text `end`, ANYCHAR at any of its characters. Tokens that contain text after the end
    are never drawn.
    """

    def __init__(self, start: Optional[str], end_type: Union[UntilEndType, str], end: str) -> None:
        self.start = start
        self.end_type = end_type
        self.end = end

    def into_strategy(self, tokenizer: Any = None) -> UntilStrategy:
        """Returns the strategy."""
        return UntilStrategy(self.start, self.end_type, self.end)


class CharsStrat(_WithRepr, StrategyConstructor):
    """Characters of one kind (`CharsMode`, or its name).

    stop: a number is the maximum number of characters; a text ends the answer and is not part of it.
    min: minimum number of characters. max: maximum number of characters if `stop` is a text.
    """

    def __init__(
        self,
        mode: Union[CharsMode, str],
        stop: Union[int, str, None] = None,
        *,
        min: Optional[int] = None,
        max: Optional[int] = None,
    ) -> None:
        self.mode = mode
        self.stop = stop
        self.min = min
        self.max = max

    def into_strategy(self, tokenizer: Any = None) -> CharsStrategy:
        """Returns the strategy."""
        return CharsStrategy(self.mode, self.stop, self.min or 0, max_chars=self.max)


class ListStrat(_WithRepr, StrategyConstructor):
    """A list of answers, e.g. `["a", "b"]` with open="[", close="]", wrap='"'.

    elements: format of every element, or a list with one format per element, which also sets their number. A format is
    one of these constructors, or a custom strategy.
    open, close: texts before and after the list. wrap: text before and after each element. sep: text between elements.
    min, max: number of elements, by default 0 and unlimited. end_with: text after `close`.

    If the stop text of an element is the beginning of `wrap`, `sep` or `close`, it occurs once. Without `close` and
    `end_with`, the model ends the list with an end-of-generation token.
    """

    def __init__(
        self,
        elements: Union[Sequence[Union[StrategyConstructor, Strategy]], StrategyConstructor, Strategy],
        open: Optional[str] = None,
        close: Optional[str] = None,
        wrap: Optional[str] = None,
        sep: Optional[str] = None,
        min: Optional[int] = None,
        max: Optional[int] = None,
        end_with: Optional[str] = None,
    ) -> None:
        self.elements = elements
        self.open = open
        self.close = close
        self.wrap = wrap
        self.sep = ", " if sep is None else sep
        self.min = len(elements) if isinstance(elements, (list, tuple)) else min
        self.max = len(elements) if isinstance(elements, (list, tuple)) else max
        self.end_with = end_with

    def into_strategy(self, tokenizer: Any = None) -> Union[ListStrategy, SequenceStrategy]:
        """Returns the strategy."""
        elements: Any = self.elements
        is_per_element = isinstance(elements, (list, tuple))
        strategies = [into_strategy(element, tokenizer) for element in (elements if is_per_element else [elements])]
        # Strategies of this package are combined into one language; custom ones are processed token by token.
        kind: Any = ListStrategy if all(isinstance(element, LanguageStrategy) for element in strategies) else SequenceStrategy
        strategy: Union[ListStrategy, SequenceStrategy] = kind(
            strategies if is_per_element else strategies[0],
            open=self.open or "",
            close=self.close or "",
            wrap=self.wrap or "",
            sep=self.sep,
            end_with=self.end_with or "",
            min_elements=self.min or 0,
            max_elements=self.max,
        )
        return strategy


def into_strategy(spec: Any, tokenizer: Any) -> Strategy:
    """Returns the strategy of a constructor, or the strategy itself.

    Raises TypeError for anything else."""
    if hasattr(spec, "into_strategy"):
        strategy: Strategy = spec.into_strategy(tokenizer)
        return strategy
    if isinstance(spec, Strategy):
        return spec
    raise TypeError("a strategy must be ChoicesStrat(…), UntilStrat(…), CharsStrat(…) or ListStrat(…), got %r" % (spec,))
