"""Strategies. Mods usually create them through constructors such as `ChoicesStrat`."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Iterable, Optional, Sequence, Set, Tuple, Union

from ..actions import Backtrack, ForceTokens
from .alphabet import CharsMode
from .base import Strategy
from .language import Chars, Choices, Language, ListLanguage, Until
from .masks import Mask, shared_automaton, token_pieces

__all__ = [
    "CharsMode",
    "CharsStrategy",
    "ChoicesStrategy",
    "LanguageStrategy",
    "ListStrategy",
    "TokensStrategy",
    "UntilEndType",
    "UntilStrategy",
]


class UntilEndType(Enum):
    """End condition of an `UntilStrat`."""

    #: The whole text.
    TAG = auto()
    #: Any of its characters.
    ANYCHAR = auto()


class LanguageState:
    """Progress of an answer in its language."""

    def __init__(self) -> None:
        self.state = 0
        self.done = False


class LanguageStrategy(Strategy):
    """An answer that is one of a set of texts.

    Every token whose bytes continue one of the texts is allowed, in any tokenization. If a complete answer could also
    continue (`yes` and `yes, but`), the model ends it by drawing an end-of-generation token, which is not part of the
    answer.
    """

    def __init__(self, language: Language) -> None:
        self.language = language
        self._automaton = shared_automaton(language)

    def start(self, tokenizer: Any) -> LanguageState:
        """Returns the state before the first token."""
        return LanguageState()

    def mask(self, state: LanguageState, tokenizer: Any) -> Mask:
        """Returns the mask of the tokens that continue the answer, without those that only end it."""
        return self._automaton.mask(state.state, token_pieces(tokenizer))

    def allowed_tokens(self, state: LanguageState, tokenizer: Any) -> Set[int]:
        """Returns the ids of the tokens that may come next."""
        allowed = self.mask(state, tokenizer).allowed()
        return allowed | token_pieces(tokenizer).ends if self.can_end(state) else allowed

    def disallowed_tokens(self, state: LanguageState, tokenizer: Any) -> Set[int]:
        """Returns the end-of-generation tokens while the answer is not complete."""
        return set() if self.can_end(state) else set(token_pieces(tokenizer).ends)

    def step(self, state: LanguageState, token_id: int, tokenizer: Any) -> Optional[Union[Backtrack, ForceTokens]]:
        """Processes a token. Returns a Backtrack if it does not fit."""
        if state.done:
            return None
        pieces = token_pieces(tokenizer)
        if token_id in pieces.ends and self.can_end(state):
            state.done = True
            return None
        piece = pieces.token_bytes(token_id)
        after = self._automaton.read(state.state, piece)
        if not piece or after < 0:
            return Backtrack(1, [])
        state.state = after
        return None

    def can_end(self, state: LanguageState) -> bool:
        """Returns True if the answer may end here."""
        return self._automaton.accepts(state.state)

    def is_complete(self, state: LanguageState) -> bool:
        """Returns True if the answer is complete: nothing can follow, or the model ended it."""
        return state.done or (self.can_end(state) and not self._automaton.can_continue(state.state))

    def trim_answer(self, answer: str) -> str:
        """Returns the answer without its end marker."""
        return answer


class ChoicesStrategy(LanguageStrategy):
    """One of several texts."""

    def __init__(self, choices: Iterable[str]) -> None:
        texts = [str(choice) for choice in choices]
        if not texts:
            raise ValueError("choices must have at least one text")
        super().__init__(Choices(texts))


class UntilStrategy(LanguageStrategy):
    """A fixed start, then any text up to and including an end. Start and end are part of the answer."""

    def __init__(self, start_tag: Optional[str], end_type: Union[UntilEndType, str], stop: str) -> None:
        if not stop:
            raise ValueError("the end text must not be empty")
        kind = UntilEndType[end_type.upper().replace("_", "")] if isinstance(end_type, str) else end_type
        super().__init__(Until(start_tag or "", [stop] if kind is UntilEndType.TAG else sorted(set(stop))))


class CharsStrategy(LanguageStrategy):
    """Characters of one kind: up to the number `stop`, or until the text `stop`, which is not part of the answer."""

    def __init__(
        self,
        kind: Union[CharsMode, str],
        stop: Union[int, str, None] = None,
        min_chars: int = 0,
        include_stop_in_answer: bool = False,
        max_chars: Optional[int] = None,
    ) -> None:
        mode = CharsMode[kind.upper()] if isinstance(kind, str) else kind
        text = stop if isinstance(stop, str) else ""
        max_count = stop if isinstance(stop, int) else max_chars
        if not text and max_count is None:
            raise ValueError("stop or max is missing: set a maximum number of characters, or a text that ends them")
        if max_count is not None and (max_count < 1 or max_count < min_chars):
            raise ValueError("min must not exceed max, and max must be 1 or more; got min %d and max %d" % (min_chars, max_count))
        self._stop = "" if include_stop_in_answer else text
        super().__init__(Chars(mode, max(0, int(min_chars or 0)), max_count, text))

    def trim_answer(self, answer: str) -> str:
        """Returns the answer without the stop text."""
        return answer[: -len(self._stop)] if self._stop and answer.endswith(self._stop) else answer


class ListStrategy(LanguageStrategy):
    """A list of answers, with fixed texts before, around, between and after them."""

    def __init__(
        self,
        elements: Union[LanguageStrategy, Sequence[LanguageStrategy]],
        *,
        open: str = "",
        close: str = "",
        wrap: str = "",
        sep: str = ", ",
        end_with: str = "",
        min_elements: int = 0,
        max_elements: Optional[int] = None,
    ) -> None:
        is_per_element = not isinstance(elements, LanguageStrategy)
        given: Tuple[Any, ...] = tuple(elements) if isinstance(elements, (list, tuple)) else (elements,)
        for element in given:
            if not isinstance(element, LanguageStrategy):
                raise TypeError("elements must be strategies of this package, got %r; ListStrat accepts custom strategies" % (element,))
        if is_per_element:
            min_elements = max_elements = len(given)
        if max_elements is not None and max_elements < max(1, min_elements):
            raise ValueError("min must not exceed max, and max must be 1 or more; got min %d and max %d" % (min_elements, max_elements))
        languages = tuple(element.language for element in given)
        super().__init__(
            ListLanguage(languages, is_per_element, open, wrap, sep, close + end_with, max(0, min_elements), max_elements)
        )


class TokensStrategy(Strategy):
    """One token out of a set of ids."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._tokens = {int(token) for token in token_ids}

    def start(self, tokenizer: Any) -> LanguageState:
        """Returns the state before the first token."""
        return LanguageState()

    def allowed_tokens(self, state: LanguageState, tokenizer: Any) -> Set[int]:
        """Returns the set of tokens."""
        return set(self._tokens)

    def disallowed_tokens(self, state: LanguageState, tokenizer: Any) -> Set[int]:
        """Returns an empty set."""
        return set()

    def step(self, state: LanguageState, token_id: int, tokenizer: Any) -> Optional[Union[Backtrack, ForceTokens]]:
        """Processes the token."""
        if token_id not in self._tokens:
            return Backtrack(1, [])
        state.done = True
        return None

    def is_complete(self, state: LanguageState) -> bool:
        """Returns True if the token was drawn."""
        return state.done

    def trim_answer(self, answer: str) -> str:
        """Returns the answer unchanged."""
        return answer
