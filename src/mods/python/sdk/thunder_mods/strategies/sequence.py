"""Lists with custom strategies as elements. They are matched token by token, because the possible texts cannot be enumerated."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Set, Tuple, Union

from ..actions import Backtrack, ForceTokens
from .base import Strategy, require_token_ids, tokenize_str
from .masks import end_tokens

#: A text that may come next: its remaining tokens, the item after it, and the number of complete elements before that item.
_NextText = Tuple[List[int], str, int]


class _ListState:
    """Position of an answer in the list."""

    def __init__(self) -> None:
        #: Number of complete elements.
        self.count = 0
        #: State of the element that may continue, or None.
        self.element: Any = None
        #: Texts that may continue.
        self.next_texts: List[_NextText] = []
        self.can_end = False
        self.done = False


class SequenceStrategy(Strategy):
    """A list of answers of any strategies, with fixed texts before, around, between and after them.

    A fixed text is accepted only as the tokens that the tokenizer encodes it to. If an element may end or continue, the next drawn
    token decides; a token that fits both continues the element.
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
        self._is_per_element = isinstance(elements, (list, tuple))
        given: Any = elements if isinstance(elements, (list, tuple)) else (elements,)
        self._elements: Tuple[Strategy, ...] = tuple(given)
        if self._is_per_element:
            min_elements = max_elements = len(self._elements)
        if max_elements is not None and max_elements < max(1, min_elements):
            raise ValueError("min must not exceed max, and max must be 1 or more; got min %d and max %d" % (min_elements, max_elements))
        self._open, self._wrap, self._sep, self._close = open, wrap, sep, close + end_with
        self._min, self._max = max(0, min_elements), max_elements

    def start(self, tokenizer: Any) -> _ListState:
        """Returns the state before the first token."""
        state = _ListState()
        texts = [(self._open + self._wrap, "element")]
        if self._min == 0:
            texts.append((self._open + self._close, "end"))
        self._start_texts(state, texts, 0, tokenizer)
        return state

    def allowed_tokens(self, state: _ListState, tokenizer: Any) -> Set[int]:
        """Returns the ids of the tokens that may come next."""
        allowed = {text[0][0] for text in state.next_texts if text[0]}
        if state.can_end:
            allowed |= set(end_tokens(tokenizer))
        if state.element is not None:
            strategy = self._strategy(state)
            forbidden = strategy.disallowed_tokens(state.element, tokenizer)
            own = strategy.allowed_tokens(state.element, tokenizer) or require_token_ids(tokenizer)
            allowed |= own - forbidden - set(end_tokens(tokenizer))
        return allowed

    def disallowed_tokens(self, state: _ListState, tokenizer: Any) -> Set[int]:
        """Returns the end-of-generation tokens while the list is not complete."""
        return set() if state.can_end else set(end_tokens(tokenizer))

    def step(self, state: _ListState, token_id: int, tokenizer: Any) -> Optional[Union[Backtrack, ForceTokens]]:
        """Processes a token. Returns a Backtrack if it does not fit, or the action requested by the element."""
        if state.done:
            return None
        if state.can_end and token_id in end_tokens(tokenizer):
            state.done = True
            return None
        if state.element is not None and self._fits(state, token_id, tokenizer):
            state.next_texts, state.can_end = [], False
            strategy = self._strategy(state)
            correction = strategy.step(state.element, token_id, tokenizer)
            if correction is None:
                self._after_element(state, tokenizer)
            return correction
        texts = [(remaining[1:], next_item, count) for remaining, next_item, count in state.next_texts if remaining and remaining[0] == token_id]
        if not texts:
            return Backtrack(1, [])
        state.element, state.can_end, state.count = None, False, texts[0][2]
        self._continue_with(state, texts, tokenizer)
        return None

    def is_complete(self, state: _ListState) -> bool:
        """Returns True if the list is complete: nothing can follow, or the model ended it."""
        return state.done

    def trim_answer(self, answer: str) -> str:
        """Returns the answer unchanged."""
        return answer

    def _strategy(self, state: _ListState) -> Strategy:
        return self._elements[min(state.count, len(self._elements) - 1) if self._is_per_element else 0]

    def _fits(self, state: _ListState, token_id: int, tokenizer: Any) -> bool:
        strategy = self._strategy(state)
        if token_id in end_tokens(tokenizer) or token_id in strategy.disallowed_tokens(state.element, tokenizer):
            return False
        allowed = strategy.allowed_tokens(state.element, tokenizer)
        return not allowed or token_id in allowed

    def _after_element(self, state: _ListState, tokenizer: Any) -> None:
        """Updates the texts that may follow an element after one of its tokens."""
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
        # If the element's stop string is also the beginning of the next text, it is not repeated.
        stop = getattr(strategy, "_stop", "") if complete else ""
        shared = [(text[len(stop) :], next_item) for text, next_item in follow if stop and text.startswith(stop)]
        if complete:
            state.count, state.element = count, None
        self._start_texts(state, shared or follow, count, tokenizer)

    def _start_texts(self, state: _ListState, texts: List[Tuple[str, str]], count: int, tokenizer: Any) -> None:
        self._continue_with(state, [(tokenize_str(text, tokenizer), next_item, count) for text, next_item in texts], tokenizer)

    def _continue_with(self, state: _ListState, texts: List[_NextText], tokenizer: Any) -> None:
        """Continues with these texts. Begins the item after each finished text."""
        state.next_texts = [text for text in texts if text[0]]
        for remaining, next_item, _ in texts:
            if not remaining and next_item == "end":
                state.can_end = True
            elif not remaining and state.element is None:
                state.element = self._strategy(state).start(tokenizer)
        state.done = state.can_end and not state.next_texts and state.element is None
