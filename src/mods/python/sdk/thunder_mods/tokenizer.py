"""The model's tokenizer. Encoding asks the server; decoding happens here, with the vocabulary fetched once."""

from __future__ import annotations

import array
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Optional, Tuple

from . import conversation as _conversation

_CACHED_TEXTS = 4096
#: Bytes of a text that is encoded at once; the server takes no more.
_LONGEST_TEXT = 1 << 20


class Tokenizer:
    """The tokenizer of a run's model, in the shape of a Hugging Face tokenizer."""

    def __init__(
        self,
        ask: Callable[[Dict[str, Any]], Tuple[Dict[str, Any], bytes]],
        size: int,
        eos_token_id: Optional[int],
        bos_token_id: Optional[int],
        end_of_generation: Iterable[int],
    ) -> None:
        self._ask = ask  # ask(header) -> (header, body)
        self._size = size
        self.eos_token_id = eos_token_id
        self.bos_token_id = bos_token_id
        #: All tokens that end a generation.
        self.end_of_generation: List[int] = list(end_of_generation)
        self._encoded: Dict[Tuple[str, bool], List[int]] = {}
        self._pieces: Optional[bytes] = None
        self._offsets: Any = ()
        self._control: FrozenSet[int] = frozenset()
        self._vocab: Optional[Dict[str, int]] = None

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return self._size

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str, add_special_tokens: bool = False, **_ignored: Any) -> List[int]:
        """Token ids of the text, which has at most a mebibyte. The literals of special tokens are read as those tokens."""
        key = (text, bool(add_special_tokens))
        tokens = self._encoded.get(key)
        if tokens is None:
            if not isinstance(text, str):
                raise TypeError("encode takes a text, not %s" % type(text).__name__)
            size = len(text.encode("utf-8", "replace"))
            if size > _LONGEST_TEXT:
                raise ValueError("encode takes a text of at most %d bytes at once, not of %d" % (_LONGEST_TEXT, size))
            answer, _ = self._ask({"what": "encode", "text": text, "add_special": key[1]})
            tokens = answer["tokens"]
            if len(self._encoded) >= _CACHED_TEXTS:
                self._encoded.clear()
            self._encoded[key] = tokens
        return list(tokens)

    def __call__(self, text: str, add_special_tokens: bool = False, **_ignored: Any) -> Dict[str, List[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_ignored: Any) -> str:
        """Text of the ids (or of one id); bytes that are no UTF-8 become U+FFFD."""
        ids = [int(ids)] if not hasattr(ids, "__iter__") else [int(token) for token in ids]
        if skip_special_tokens:
            self._load()
            ids = [token for token in ids if token not in self._control]
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """Bytes of one token; a character may be spread over several tokens."""
        pieces = self._load()
        if not 0 <= token < self._size:
            raise IndexError("%s is not a token; ids are 0 to %s" % (token, self._size - 1))
        return bytes(pieces[self._offsets[token] : self._offsets[token + 1]])

    def pieces(self) -> List[bytes]:
        """Bytes of every token, by id."""
        data, offsets = self._load(), list(self._offsets)
        return [data[start:end] for start, end in zip(offsets, offsets[1:])]

    def get_vocab(self) -> Dict[str, int]:
        """{text: id}; of several tokens with the same text, the first."""
        if self._vocab is None:
            vocab: Dict[str, int] = {}
            for token, text in enumerate(self.convert_ids_to_tokens(range(self._size))):
                vocab.setdefault(text, token)
            self._vocab = vocab
        return dict(self._vocab)

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Text of each id, or of one id."""
        if not hasattr(ids, "__iter__"):
            return self.piece(int(ids)).decode("utf-8", "replace")
        return [self.piece(int(token)).decode("utf-8", "replace") for token in ids]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Id of each text, or of one text; None for a text that is no token."""
        vocab = self.get_vocab()
        return vocab.get(tokens) if isinstance(tokens, str) else [vocab.get(token) for token in tokens]

    @property
    def all_special_ids(self) -> List[int]:
        """Ids of the control tokens, which are no text."""
        self._load()
        return sorted(self._control)

    @property
    def eos_token(self) -> Optional[str]:
        """Text of the token that ends a sequence."""
        return None if self.eos_token_id is None else self.convert_ids_to_tokens(self.eos_token_id)

    @property
    def bos_token(self) -> Optional[str]:
        """Text of the token that begins a sequence."""
        return None if self.bos_token_id is None else self.convert_ids_to_tokens(self.bos_token_id)

    def _load(self) -> bytes:
        if self._pieces is not None:
            return self._pieces
        answer, body = self._ask({"what": "vocabulary"})
        width = 4 * (self._size + 1)
        offsets = array.array("I")
        offsets.frombytes(body[:width])
        self._offsets, self._control, self._pieces = offsets, frozenset(answer["control"]), body[width:]
        return self._pieces


def tokenize(text: str, tokenizer: Any = None, *, add_special_tokens: bool = False) -> List[int]:
    """Token ids of the text; without a tokenizer, that of the present run."""
    if tokenizer is None:
        if _conversation.current is None:
            raise RuntimeError("there is no run at this moment; call tokenize within a mod, or give it a tokenizer")
        tokenizer = _conversation.current.tokenizer
    if hasattr(tokenizer, "encode"):
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens)]
    ids = tokenizer(text)
    return [int(token) for token in (ids["input_ids"] if isinstance(ids, dict) else ids)]
