"""Interfaces of strategies, for custom implementations."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional, Protocol, Set, Union, runtime_checkable

from ..actions import Backtrack, ForceTokens


class RuntimeState(Protocol):
    """Progress of one answer; only its strategy knows the content."""


@runtime_checkable
class Strategy(Protocol):
    """Defines the tokens that may continue an answer, and its end. One strategy can serve several answers at a time."""

    def start(self, tokenizer: Any) -> RuntimeState:
        """Returns the state before the first token."""
        ...

    def allowed_tokens(self, state: Any, tokenizer: Any) -> Set[int]:
        """Returns the ids of the tokens that may come next. An empty set permits all tokens that are not disallowed."""
        ...

    def disallowed_tokens(self, state: Any, tokenizer: Any) -> Set[int]:
        """Returns the ids of tokens that must not come next."""
        ...

    def step(self, state: Any, token_id: int, tokenizer: Any) -> Optional[Union[Backtrack, ForceTokens]]:
        """Processes a token of the answer. May return an action that removes or appends tokens."""
        ...

    def is_complete(self, state: Any) -> bool:
        """Returns True if the answer is complete."""
        ...

    def trim_answer(self, answer: str) -> str:
        """Returns the answer without its end marker."""
        ...


@runtime_checkable
class StrategyConstructor(Protocol):
    """Constructor of a strategy for a tokenizer: `ChoicesStrat`, `UntilStrat`, `CharsStrat`, `ListStrat`, or custom."""

    def into_strategy(self, tokenizer: Any) -> Strategy:
        """Returns the strategy for this tokenizer."""
        ...


def require_token_ids(tokenizer: Any) -> Set[int]:
    """Returns all token ids of the tokenizer."""
    try:
        return set(range(len(tokenizer)))
    except TypeError:
        vocabulary: Any = getattr(tokenizer, "get_vocab", dict)()
    if not vocabulary:
        raise RuntimeError("the tokenizer has neither a length nor a vocabulary")
    return {int(token) for token in vocabulary.values()}


def tokenize_str(text: Optional[str], tokenizer: Any) -> "list[int]":
    """Returns the token ids of a text; [] without text."""
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)] if text else []


def decode_token(tokenizer: Any, token_id: int) -> str:
    """Returns the text of a token; "" for a control token."""
    return str(tokenizer.decode([int(token_id)], skip_special_tokens=True))


class TrieNode:
    """Prefix tree of token sequences, for custom strategies."""

    def __init__(self) -> None:
        #: Children by token id.
        self.children: Dict[int, TrieNode] = {}
        #: True if a sequence ends here.
        self.terminal = False

    def insert(self, sequence: Iterable[int]) -> None:
        """Adds a sequence."""
        node = self
        for token in sequence:
            node = node.children.setdefault(int(token), TrieNode())
        node.terminal = True
