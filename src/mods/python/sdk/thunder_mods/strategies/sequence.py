"""A list whose elements are strategies of one's own: token by token, since only they know what they allow."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Set, Tuple, Union

from ..actions import Backtrack, ForceTokens
from .base import Strategy, require_token_ids, tokenize_str
from .masks import end_tokens

#: A text that may come next: its tokens that are left, what is behind it, and how many elements are complete then.
_Way = Tuple[List[int], str, int]


class _Place:
    """Where in the list an answer is."""

    def __init__(self) -> None:
        #: Elements that are complete.
        self.count = 0
        #: State of the element that may go on; None where there is none.
        self.element: Any = None
        #: Texts that may go on.
        self.ways: List[_Way] = []
        self.can_end = False
        self.done = False


class SequenceStrategy(Strategy):
    """Several answers in a row, of any strategies, with what stands before, around, between and after them.

    Of each text between two elements only its own tokens are drawn. Where an element may end or go on, the model decides
    by what it draws; a token that fits both goes on with the element.
    """

    def __init__(
        self,
        elements: Union[Strategy, Sequence[Strategy]],
        *,
        open: str = "",
        close: str = "",
        wrap: str = "",
        sep: str = ", ",
        end_with: str = "",
        min_elements: int = 0,
        max_elements: Optional[int] = None,
    ) -> None:
        self._each = isinstance(elements, (list, tuple))
        given: Any = elements if isinstance(elements, (list, tuple)) else (elements,)
        self._elements: Tuple[Strategy, ...] = tuple(given)
        if self._each:
            min_elements = max_elements = len(self._elements)
        if max_elements is not None and max_elements < max(1, min_elements):
            raise ValueError("at least %d and at most %d elements cannot be" % (min_elements, max_elements))
        self._open, self._wrap, self._sep, self._close = open, wrap, sep, close + end_with
        self._min, self._max = max(0, min_elements), max_elements

    def start(self, tokenizer: Any) -> _Place:
        """The state before the first token."""
        place = _Place()
        texts = [(self._open + self._wrap, "element")]
        if self._min == 0:
            texts.append((self._open + self._close, "end"))
        self._open_ways(place, texts, 0, tokenizer)
        return place

    def allowed_tokens(self, state: _Place, tokenizer: Any) -> Set[int]:
        """Ids of the tokens that may come next."""
        allowed = {way[0][0] for way in state.ways if way[0]}
        if state.can_end:
            allowed |= set(end_tokens(tokenizer))
        if state.element is not None:
            strategy = self._strategy(state)
            forbidden = strategy.disallowed_tokens(state.element, tokenizer)
            own = strategy.allowed_tokens(state.element, tokenizer) or require_token_ids(tokenizer)
            allowed |= own - forbidden - set(end_tokens(tokenizer))
        return allowed

    def disallowed_tokens(self, state: _Place, tokenizer: Any) -> Set[int]:
        """The tokens that end a generation, as long as the list is not complete."""
        return set() if state.can_end else set(end_tokens(tokenizer))

    def step(self, state: _Place, token_id: int, tokenizer: Any) -> Optional[Union[Backtrack, ForceTokens]]:
        """Takes a token; one that does not fit is asked back, or whatever the element asks for."""
        if state.done:
            return None
        if state.can_end and token_id in end_tokens(tokenizer):
            state.done = True
            return None
        if state.element is not None and self._fits(state, token_id, tokenizer):
            state.ways, state.can_end = [], False
            strategy = self._strategy(state)
            asked = strategy.step(state.element, token_id, tokenizer)
            if asked is None:
                self._look(state, tokenizer)
            return asked
        ways = [(left[1:], behind, count) for left, behind, count in state.ways if left and left[0] == token_id]
        if not ways:
            return Backtrack(1, [])
        state.element, state.can_end, state.count = None, False, ways[0][2]
        self._take(state, ways, tokenizer)
        return None

    def is_complete(self, state: _Place) -> bool:
        """Whether the list is complete: nothing can follow, or the model ended it."""
        return state.done

    def trim_answer(self, answer: str) -> str:
        """The answer as it is."""
        return answer

    def _strategy(self, state: _Place) -> Strategy:
        return self._elements[min(state.count, len(self._elements) - 1) if self._each else 0]

    def _fits(self, state: _Place, token_id: int, tokenizer: Any) -> bool:
        strategy = self._strategy(state)
        if token_id in end_tokens(tokenizer) or token_id in strategy.disallowed_tokens(state.element, tokenizer):
            return False
        allowed = strategy.allowed_tokens(state.element, tokenizer)
        return not allowed or token_id in allowed

    def _look(self, state: _Place, tokenizer: Any) -> None:
        """What may follow an element that has taken a token."""
        strategy = self._strategy(state)
        complete = strategy.is_complete(state.element)
        if not complete and not getattr(strategy, "can_end", lambda _: False)(state.element):
            return
        count = state.count + 1
        follow = []
        if self._max is None or count < self._max:
            follow.append((self._wrap + self._sep + self._wrap, "element"))
        if count >= self._min:
            follow.append((self._wrap + self._close, "end"))
        # A stop that is also the beginning of what follows it is written once.
        stop = getattr(strategy, "_stop", "") if complete else ""
        shared = [(text[len(stop) :], behind) for text, behind in follow if stop and text.startswith(stop)]
        if complete:
            state.count, state.element = count, None
        self._open_ways(state, shared or follow, count, tokenizer)

    def _open_ways(self, state: _Place, texts: List[Tuple[str, str]], count: int, tokenizer: Any) -> None:
        self._take(state, [(tokenize_str(text, tokenizer), behind, count) for text, behind in texts], tokenizer)

    def _take(self, state: _Place, ways: List[_Way], tokenizer: Any) -> None:
        """Goes on with these texts; what is behind one that is over begins."""
        state.ways = [way for way in ways if way[0]]
        for left, behind, _ in ways:
            if not left and behind == "end":
                state.can_end = True
            elif not left and state.element is None:
                state.element = self._strategy(state).start(tokenizer)
        state.done = state.can_end and not state.ways and state.element is None
