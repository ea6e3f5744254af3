"""What a mod says when it wants an answer of a certain form; the tokenizer comes later."""

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


class _Described:
    def __repr__(self) -> str:
        fields = ("%s=%r" % field for field in vars(self).items() if field[1] is not None)
        return "%s(%s)" % (type(self).__name__, ", ".join(fields))


class ChoicesStrat(_Described, StrategyConstructor):
    """Exactly one of `choices`. Where one begins with another (`no`, `not yet`), the model may go on after the shorter
    or end the answer with a token that ends a generation."""

    def __init__(self, choices: List[str]) -> None:
        self.choices = list(choices)

    def into_strategy(self, tokenizer: Any = None) -> ChoicesStrategy:
        """The strategy."""
        return ChoicesStrategy(self.choices)


class UntilStrat(_Described, StrategyConstructor):
    """`start`, then any text, up to and with `end`; the answer holds both.

    end_type: TAG ends at the whole text `end`, ANYCHAR at any of its characters. No token is drawn that goes on past
    the end.
    """

    def __init__(self, start: Optional[str], end_type: Union[UntilEndType, str], end: str) -> None:
        self.start = start
        self.end_type = end_type
        self.end = end

    def into_strategy(self, tokenizer: Any = None) -> UntilStrategy:
        """The strategy."""
        return UntilStrategy(self.start, self.end_type, self.end)


class CharsStrat(_Described, StrategyConstructor):
    """Characters of one kind (`CharsMode`, or its name).

    stop: a number is the most characters; a text ends the answer and is not part of it.
    min: the fewest characters. max: the most, where `stop` is a text.
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
        """The strategy."""
        return CharsStrategy(self.mode, self.stop, self.min or 0, max_chars=self.max)


class ListStrat(_Described, StrategyConstructor):
    """A list of answers, e.g. `["a", "b"]` with open="[", close="]", wrap='"'.

    elements: the form of every element; or a list with one form for each, which then also says how many there are. A form is
    one of these constructors, or a strategy of your own.
    open, close: stand before and after the list. wrap: stands before and after each element. sep: stands between.
    min, max: how many elements, 0 and any by default. end_with: stands after `close`.

    An element that is stopped by a text with which `wrap`, `sep` or `close` begins shares it with them: it is written
    once. Without `close` and `end_with`, the model ends the list with a token that ends a generation.
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
        """The strategy."""
        elements: Any = self.elements
        each = isinstance(elements, (list, tuple))
        made = [into_strategy(element, tokenizer) for element in (elements if each else [elements])]
        # What strategies of this package allow is known as a whole; what others do, token by token.
        kind: Any = ListStrategy if all(isinstance(element, LanguageStrategy) for element in made) else SequenceStrategy
        built: Union[ListStrategy, SequenceStrategy] = kind(
            made if each else made[0],
            open=self.open or "",
            close=self.close or "",
            wrap=self.wrap or "",
            sep=self.sep,
            end_with=self.end_with or "",
            min_elements=self.min or 0,
            max_elements=self.max,
        )
        return built


def into_strategy(spec: Any, tokenizer: Any) -> Strategy:
    """The strategy of a constructor, or of what already is one.

    Raises TypeError for anything else."""
    if hasattr(spec, "into_strategy"):
        made: Strategy = spec.into_strategy(tokenizer)
        return made
    if isinstance(spec, Strategy):
        return spec
    raise TypeError("a strategy is ChoicesStrat(…), UntilStrat(…), CharsStrat(…) or ListStrat(…), not %r" % (spec,))
