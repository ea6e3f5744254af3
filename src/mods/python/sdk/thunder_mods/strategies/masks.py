"""Masks of the tokens that may come next: a language matched against the bytes of every token of a vocabulary."""

from __future__ import annotations

from array import array
from typing import Any, Dict, FrozenSet, Iterator, List, Optional, Set, Tuple
from weakref import WeakKeyDictionary

from .base import require_token_ids
from .language import Config, Language

#: State after bytes with which no text begins.
_DEAD = -1
#: Maximum cached masks of an automaton.
_MAX_MASKS = 512
#: Minimum tokens of a group for which `_loop_bytes` is computed. Smaller groups are checked token by token.
_MIN_GROUP_SIZE = 40
#: Maximum cached automata.
_MAX_AUTOMATA = 128


class Pieces:
    """Bytes of the tokens of a vocabulary; empty for control tokens and end-of-generation tokens."""

    def __init__(self, tokenizer: Any) -> None:
        # Tests of mods may use tokenizers without a length.
        self.size = 1 + max(require_token_ids(tokenizer), default=-1)
        self.ends: FrozenSet[int] = frozenset(end_tokens(tokenizer))
        without_bytes = self.ends.union(int(token) for token in getattr(tokenizer, "all_special_ids", None) or ())
        if hasattr(tokenizer, "pieces"):
            self._pieces: List[bytes] = list(tokenizer.pieces())
        else:
            self._pieces = [tokenizer.decode([token]).encode("utf-8", "replace") for token in range(self.size)]
        for token in without_bytes:
            if 0 <= token < self.size:
                self._pieces[token] = b""
        #: Tokens of one byte: (token, byte).
        self.single: List[Tuple[int, int]] = []
        #: Longer tokens by their first two bytes: (token, other bytes).
        self.groups: Dict[bytes, List[Tuple[int, bytes]]] = {}
        groups = self.groups
        for token, piece in enumerate(self._pieces):
            if len(piece) > 1:
                head = piece[:2]
                members = groups.get(head)
                if members is None:
                    groups[head] = members = []
                members.append((token, piece[2:]))
            elif piece:
                self.single.append((token, piece[0]))
        self.longest = max(map(len, self._pieces), default=1)

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token."""
        return self._pieces[token] if 0 <= token < self.size else b""


def end_tokens(tokenizer: Any) -> List[int]:
    """Returns the end-of-generation tokens."""
    found = getattr(tokenizer, "end_of_generation", None)
    if found is not None:
        return [int(token) for token in found]
    eos = getattr(tokenizer, "eos_token_id", None)
    return [] if eos is None else [int(eos)]


_pieces_by_tokenizer: "WeakKeyDictionary[Any, Pieces]" = WeakKeyDictionary()


def token_pieces(tokenizer: Any) -> Pieces:
    """Returns the pieces of a tokenizer, computed once."""
    pieces = _pieces_by_tokenizer.get(tokenizer)
    if pieces is None:
        pieces = _pieces_by_tokenizer[tokenizer] = Pieces(tokenizer)
    return pieces


class Mask:
    """The tokens that may come next, stored as the allowed or the forbidden ones, whichever are fewer."""

    def __init__(self, size: int, allowed: List[int]) -> None:
        self.size = size
        self.count = len(allowed)
        self.inverted = len(allowed) > size // 2
        if self.inverted:
            kept = set(allowed)
            allowed = [token for token in range(size) if token not in kept]
        #: Allowed tokens; forbidden ones if inverted.
        self.tokens = array("i", allowed)

    def allowed(self) -> Set[int]:
        """Returns the allowed tokens as a set."""
        tokens = set(self.tokens)
        return set(range(self.size)) - tokens if self.inverted else tokens


class Automaton:
    """A language as a deterministic automaton that is built lazily. States are numbers; 0 is the first."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._configs: List[FrozenSet[Config]] = []
        self._numbers: Dict[FrozenSet[Config], int] = {}
        self._table: List[Dict[int, int]] = []
        self._accepts: List[bool] = []
        self._can_continue: Dict[int, bool] = {}
        self._loops: Dict[int, bytes] = {}
        self._masks: "WeakKeyDictionary[Pieces, Dict[int, Mask]]" = WeakKeyDictionary()
        self._number(frozenset(language.first()))

    def step(self, state: int, byte: int) -> int:
        """Returns the state after one more byte; a negative number if no text continues with the byte."""
        if state < 0:
            return _DEAD
        after = self._table[state].get(byte)
        if after is None:
            step = self._language.step
            configs = frozenset(found for config in self._configs[state] for found in step(config, byte))
            after = self._table[state][byte] = self._number(configs) if configs else _DEAD
        return after

    def read(self, state: int, data: bytes) -> int:
        """Returns the state after these bytes."""
        for byte in data:
            state = self.step(state, byte)
            if state < 0:
                break
        return state

    def accepts(self, state: int) -> bool:
        """Returns True if the bytes read are a complete answer."""
        return state >= 0 and self._accepts[state]

    def can_continue(self, state: int) -> bool:
        """Returns True if more bytes can follow."""
        known = self._can_continue.get(state)
        if known is None:
            known = self._can_continue[state] = any(self.step(state, byte) >= 0 for byte in range(256))
        return known

    def mask(self, state: int, pieces: Pieces) -> Mask:
        """Returns the mask of the tokens whose bytes can follow."""
        configs = self._configs[state]
        canonical = frozenset(self._language.canonicalize(config, pieces.longest) for config in configs)
        state = state if canonical == configs else self._number(canonical)
        masks = self._masks.setdefault(pieces, {})
        mask = masks.get(state)
        if mask is None:
            if len(masks) >= _MAX_MASKS:
                masks.clear()
            mask = masks[state] = Mask(pieces.size, sorted(self._fitting(state, pieces)))
        return mask

    def _fitting(self, state: int, pieces: Pieces) -> Iterator[int]:
        for token, byte in pieces.single:
            if self.step(state, byte) >= 0:
                yield token
        table, step = self._table, self.step
        for (first, second), members in pieces.groups.items():
            start = step(step(state, first), second)
            if start < 0:
                continue
            loop_bytes = self._loop_bytes(start) if len(members) >= _MIN_GROUP_SIZE else b""
            for token, rest in members:
                if not rest.translate(None, loop_bytes):
                    yield token
                    continue
                at = start
                for byte in rest:
                    after = table[at].get(byte)
                    at = step(at, byte) if after is None else after
                    if at < 0:
                        break
                else:
                    yield token

    def _loop_bytes(self, state: int) -> bytes:
        """Returns the bytes that do not change the state. A token of such bytes needs no further check."""
        known = self._loops.get(state)
        if known is None:
            known = self._loops[state] = bytes(byte for byte in range(256) if self.step(state, byte) == state)
        return known

    def _number(self, configs: FrozenSet[Config]) -> int:
        number = self._numbers.get(configs)
        if number is None:
            number = self._numbers[configs] = len(self._configs)
            self._configs.append(configs)
            self._table.append({})
            self._accepts.append(any(map(self._language.accepts, configs)))
        return number


_automata: Dict[Language, Automaton] = {}


def shared_automaton(language: Language) -> Automaton:
    """Returns the automaton of a language. Equal languages share one, so that masks are computed once for all runs."""
    automaton: Optional[Automaton] = _automata.get(language)
    if automaton is None:
        if len(_automata) >= _MAX_AUTOMATA:
            _automata.clear()
        automaton = _automata[language] = Automaton(language)
    return automaton
