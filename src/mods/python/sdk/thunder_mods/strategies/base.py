"""What a strategy is, for those who write their own."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional, Protocol, Set, Union, runtime_checkable

from ..actions import Backtrack, ForceTokens


class RuntimeState(Protocol):
    """How far one answer has got; only its strategy knows what is in it."""


@runtime_checkable
class Strategy(Protocol):
    """Which tokens an answer may go on with, and when it is complete. One object serves many answers."""

    def start(self, tokenizer: Any) -> RuntimeState:
        """The state before the first token."""
        ...

    def allowed_tokens(self, state: Any, tokenizer: Any) -> Set[int]:
        """Ids of the tokens that may come next; an empty set permits all that are not disallowed."""
        ...

    def disallowed_tokens(self, state: Any, tokenizer: Any) -> Set[int]:
        """Ids of tokens that may not come next."""
        ...

    def step(self, state: Any, token_id: int, tokenizer: Any) -> Optional[Union[Backtrack, ForceTokens]]:
        """Takes a token of the answer. May ask for tokens to be taken back or appended."""
        ...

    def is_complete(self, state: Any) -> bool:
        """Whether the answer is complete."""
        ...

    def trim_answer(self, answer: str) -> str:
        """The answer without what only marked its end."""
        ...


@runtime_checkable
class StrategyConstructor(Protocol):
    """What makes a strategy for a tokenizer: `ChoicesStrat`, `UntilStrat`, `CharsStrat`, `ListStrat`, or your own."""

    def into_strategy(self, tokenizer: Any) -> Strategy:
        """The strategy for this tokenizer."""
        ...


def require_token_ids(tokenizer: Any) -> Set[int]:
    """All token ids of the tokenizer."""
    try:
        return set(range(len(tokenizer)))
    except TypeError:
        vocabulary: Any = getattr(tokenizer, "get_vocab", dict)()
    if not vocabulary:
        raise RuntimeError("the tokenizer has neither a length nor a vocabulary")
    return {int(token) for token in vocabulary.values()}


def tokenize_str(text: Optional[str], tokenizer: Any) -> "list[int]":
    """Token ids of the text; none for no text."""
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)] if text else []


def decode_token(tokenizer: Any, token_id: int) -> str:
    """The token's text; "" for a control token."""
    return str(tokenizer.decode([int(token_id)], skip_special_tokens=True))


class TrieNode:
    """A set of token sequences by their beginnings, for strategies of your own."""

    def __init__(self) -> None:
        #: What can follow, by token id.
        self.children: Dict[int, TrieNode] = {}
        #: Whether a sequence ends here.
        self.terminal = False

    def insert(self, sequence: Iterable[int]) -> None:
        """Adds a sequence."""
        node = self
        for token in sequence:
            node = node.children.setdefault(int(token), TrieNode())
        node.terminal = True
