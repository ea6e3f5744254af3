"""Tokenizer of the model. The server encodes; decoding is local, with a vocabulary that is fetched once."""

from __future__ import annotations

import array
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Optional, Tuple

from . import conversation as _conversation

_CACHED_TEXTS = 4096
#: Maximum bytes of a text for one encoding; the server rejects longer texts.
_MAX_TEXT_BYTES = 1 << 20
#: Text of an image in a prompt.
_IMAGE = b"<image>"


class Tokenizer:
    """Tokenizer of a run's model, with the interface of a Hugging Face tokenizer."""

    def __init__(
        self,
        query: Callable[[Dict[str, Any]], Tuple[Dict[str, Any], bytes]],
        size: int,
        eos_token_id: Optional[int],
        bos_token_id: Optional[int],
        end_of_generation: Iterable[int],
    ) -> None:
        self._query = query  # query(header) -> (header, body)
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
        """Size of the vocabulary."""
        return self._size

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str, add_special_tokens: bool = False, **_ignored: Any) -> List[int]:
        """Returns the token ids of a text of up to 1 MiB. Names of special tokens are encoded as those tokens."""
        key = (text, bool(add_special_tokens))
        tokens = self._encoded.get(key)
        if tokens is None:
            if not isinstance(text, str):
                raise TypeError("encode takes a str, got %s" % type(text).__name__)
            size = len(text.encode("utf-8", "replace"))
            if size > _MAX_TEXT_BYTES:
                raise ValueError("encode takes a text of up to %d bytes, got %d" % (_MAX_TEXT_BYTES, size))
            answer, _ = self._query({"what": "encode", "text": text, "add_special": key[1]})
            tokens = answer["tokens"]
            if len(self._encoded) >= _CACHED_TEXTS:
                self._encoded.clear()
            self._encoded[key] = tokens
        return list(tokens)

    def __call__(self, text: str, add_special_tokens: bool = False, **_ignored: Any) -> Dict[str, List[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_ignored: Any) -> str:
        """Returns the text of the ids (or of one id); bytes that are not UTF-8 become U+FFFD, an image becomes `<image>`."""
        ids = [int(ids)] if not hasattr(ids, "__iter__") else [int(token) for token in ids]
        if skip_special_tokens:
            self._load()
            ids = [token for token in ids if token not in self._control]
        starts = (token < -1 <= before for before, token in zip([0, *ids], ids))
        pieces = (_IMAGE if starts_image else self.piece(token) for token, starts_image in zip(ids, starts))
        return b"".join(pieces).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """Returns the bytes of one token; a character may span several tokens. Placeholders of images, whose ids are below -1,
        have none."""
        pieces = self._load()
        if token < -1:
            return b""
        if not 0 <= token < self._size:
            raise IndexError("token %s is not in the vocabulary; ids must be from 0 to %s" % (token, self._size - 1))
        return bytes(pieces[self._offsets[token] : self._offsets[token + 1]])

    def pieces(self) -> List[bytes]:
        """Returns the bytes of every token, by id."""
        data, offsets = self._load(), list(self._offsets)
        return [data[start:end] for start, end in zip(offsets, offsets[1:])]

    def get_vocab(self) -> Dict[str, int]:
        """Returns {text: id}, with the first of several tokens that have the same text."""
        if self._vocab is None:
            vocab: Dict[str, int] = {}
            for token, text in enumerate(self.convert_ids_to_tokens(range(self._size))):
                vocab.setdefault(text, token)
            self._vocab = vocab
        return dict(self._vocab)

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Returns the text of each id, or of one id."""
        if not hasattr(ids, "__iter__"):
            return self.piece(int(ids)).decode("utf-8", "replace")
        return [self.piece(int(token)).decode("utf-8", "replace") for token in ids]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Returns the id of each text, or of one text; None for a text that is not a token."""
        vocab = self.get_vocab()
        return vocab.get(tokens) if isinstance(tokens, str) else [vocab.get(token) for token in tokens]

    @property
    def all_special_ids(self) -> List[int]:
        """Ids of the control tokens."""
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
        answer, body = self._query({"what": "vocabulary"})
        width = 4 * (self._size + 1)
        offsets = array.array("I")
        offsets.frombytes(body[:width])
        self._offsets, self._control, self._pieces = offsets, frozenset(answer["control"]), body[width:]
        return self._pieces


def tokenize(text: str, tokenizer: Any = None, *, add_special_tokens: bool = False) -> List[int]:
    """Returns the token ids of a text, by default with the tokenizer of the current run."""
    if tokenizer is None:
        if _conversation.current is None:
            raise RuntimeError("no run is active; call tokenize within a mod, or pass a tokenizer")
        tokenizer = _conversation.current.tokenizer
    if hasattr(tokenizer, "encode"):
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens)]
    ids = tokenizer(text)
    return [int(token) for token in (ids["input_ids"] if isinstance(ids, dict) else ids)]
