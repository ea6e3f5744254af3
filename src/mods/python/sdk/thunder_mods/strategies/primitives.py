"""The strategies themselves. Mods mostly name them through the constructors, `ChoicesStrat` and so on."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Iterable, Optional, Sequence, Set, Tuple, Union

from ..actions import Backtrack, ForceTokens
from .alphabet import CharsMode
from .base import Strategy
from .language import Chars, Choices, Language, Several, Until
from .masks import Mask, machine_of, pieces_of

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
    """What ends an `UntilStrat`."""

    #: The whole text.
    TAG = auto()
    #: Any of its characters.
    ANYCHAR = auto()


class Reading:
    """How far an answer has got in its language."""

    def __init__(self) -> None:
        self.state = 0
        self.done = False


class LanguageStrategy(Strategy):
    """An answer that is one of a set of texts.

    Every token is allowed whose bytes go on with one of the texts, however the tokenizer would split it. Where a
    complete answer could also go on (`yes` and `yes, but`), the model says that it is complete by drawing a token that
    ends a generation; that token is not part of the answer.
    """

    def __init__(self, language: Language) -> None:
        self.language = language
        self._machine = machine_of(language)

    def start(self, tokenizer: Any) -> Reading:
        """The state before the first token."""
        return Reading()

    def mask(self, state: Reading, tokenizer: Any) -> Mask:
        """The tokens that can go on with the answer; those that only end it are not among them."""
        return self._machine.mask(state.state, pieces_of(tokenizer))

    def allowed_tokens(self, state: Reading, tokenizer: Any) -> Set[int]:
        """Ids of the tokens that may come next."""
        allowed = self.mask(state, tokenizer).allowed()
        return allowed | pieces_of(tokenizer).ends if self.can_end(state) else allowed

    def disallowed_tokens(self, state: Reading, tokenizer: Any) -> Set[int]:
        """The tokens that end a generation, as long as the answer is not complete."""
        return set() if self.can_end(state) else set(pieces_of(tokenizer).ends)

    def step(self, state: Reading, token_id: int, tokenizer: Any) -> Optional[Union[Backtrack, ForceTokens]]:
        """Takes a token; one that does not fit is asked back."""
        if state.done:
            return None
        pieces = pieces_of(tokenizer)
        if token_id in pieces.ends and self.can_end(state):
            state.done = True
            return None
        piece = pieces.bytes_of(token_id)
        after = self._machine.read(state.state, piece)
        if not piece or after < 0:
            return Backtrack(1, [])
        state.state = after
        return None

    def can_end(self, state: Reading) -> bool:
        """Whether the answer may be complete as it is."""
        return self._machine.accepts(state.state)

    def is_complete(self, state: Reading) -> bool:
        """Whether the answer is complete: nothing can follow, or the model ended it."""
        return state.done or (self.can_end(state) and not self._machine.goes_on(state.state))

    def trim_answer(self, answer: str) -> str:
        """The answer without what only marked its end."""
        return answer


class ChoicesStrategy(LanguageStrategy):
    """One of several texts."""

    def __init__(self, choices: Iterable[str]) -> None:
        texts = [str(choice) for choice in choices]
        if not texts:
            raise ValueError("a choice needs at least one text to choose from")
        super().__init__(Choices(texts))


class UntilStrategy(LanguageStrategy):
    """Any text up to and with an end, after a fixed beginning; both are part of the answer."""

    def __init__(self, start_tag: Optional[str], end_type: Union[UntilEndType, str], stop: str) -> None:
        if not stop:
            raise ValueError("a text that goes on until an end needs an end")
        kind = UntilEndType[end_type.upper().replace("_", "")] if isinstance(end_type, str) else end_type
        super().__init__(Until(start_tag or "", [stop] if kind is UntilEndType.TAG else sorted(set(stop))))


class CharsStrategy(LanguageStrategy):
    """Characters of one kind: up to `stop` of them, or up to the text `stop`, which is not part of the answer."""

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
        most = stop if isinstance(stop, int) else max_chars
        if not text and most is None:
            raise ValueError("characters need an end: the most there may be, or a text that stops them")
        if most is not None and (most < 1 or most < min_chars):
            raise ValueError("at least %d and at most %d characters cannot be" % (min_chars, most))
        self._stop = "" if include_stop_in_answer else text
        super().__init__(Chars(mode, max(0, int(min_chars or 0)), most, text))

    def trim_answer(self, answer: str) -> str:
        """The answer without the stop."""
        return answer[: -len(self._stop)] if self._stop and answer.endswith(self._stop) else answer


class ListStrategy(LanguageStrategy):
    """Several answers in a row, with what stands before, around, between and after them."""

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
        each = not isinstance(elements, LanguageStrategy)
        given: Tuple[Any, ...] = tuple(elements) if isinstance(elements, (list, tuple)) else (elements,)
        for element in given:
            if not isinstance(element, LanguageStrategy):
                raise TypeError("this list takes strategies of the package as elements, and ListStrat any; not %r" % (element,))
        if each:
            min_elements = max_elements = len(given)
        if max_elements is not None and max_elements < max(1, min_elements):
            raise ValueError("at least %d and at most %d elements cannot be" % (min_elements, max_elements))
        languages = tuple(element.language for element in given)
        super().__init__(
            Several(languages, each, open, wrap, sep, close + end_with, max(0, min_elements), max_elements)
        )


class TokensStrategy(Strategy):
    """One token out of a set of ids."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._tokens = {int(token) for token in token_ids}

    def start(self, tokenizer: Any) -> Reading:
        """The state before the first token."""
        return Reading()

    def allowed_tokens(self, state: Reading, tokenizer: Any) -> Set[int]:
        """The set."""
        return set(self._tokens)

    def disallowed_tokens(self, state: Reading, tokenizer: Any) -> Set[int]:
        """None beyond what is not in the set."""
        return set()

    def step(self, state: Reading, token_id: int, tokenizer: Any) -> Optional[Union[Backtrack, ForceTokens]]:
        """Takes the token."""
        if token_id not in self._tokens:
            return Backtrack(1, [])
        state.done = True
        return None

    def is_complete(self, state: Reading) -> bool:
        """Whether the token was taken."""
        return state.done

    def trim_answer(self, answer: str) -> str:
        """The answer as it is."""
        return answer
