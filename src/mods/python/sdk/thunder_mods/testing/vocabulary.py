"""Small vocabulary for tests: all bytes, some words, and the tokens that begin and end a text."""

from __future__ import annotations

import array
from typing import Any, Dict, Iterable, List, Tuple

from ..tokenizer import Tokenizer

_WORDS = (
    " the", " a", " is", " and", " of", " to", " in", " you", " I", " not", "ing", "ed", "er", "th", "he", "in", "an",
    "yes", "no", " yes", " no", "Hello", " world", "true", "false", "10", "20", '",', '", "', '"]', "\n\n", "  ", "...",
)  # fmt: skip


class WordTokenizer(Tokenizer):
    """Tokenizer whose tokens 0 to 255 are bytes, followed by `words`, <bos> and <eos>. Encoding takes the longest match."""

    def __init__(self, words: Iterable[str] = _WORDS) -> None:
        pieces = [bytes((byte,)) for byte in range(256)]
        pieces.extend(word.encode("utf-8") for word in dict.fromkeys(words) if len(word.encode("utf-8")) > 1)
        self._token_by_piece: Dict[bytes, int] = {piece: token for token, piece in enumerate(pieces)}
        self._longest = max(map(len, pieces))
        self._body = pieces + [b"<bos>", b"<eos>"]
        bos, eos = len(pieces), len(pieces) + 1
        super().__init__(self._answer_query, len(self._body), eos, bos, [eos])

    def _answer_query(self, question: Dict[str, Any]) -> Tuple[Dict[str, Any], bytes]:
        if question["what"] == "encode":
            tokens = self._split(question["text"].encode("utf-8"))
            bos = [self.bos_token_id] if question["add_special"] else []
            return {"tokens": bos + tokens}, b""
        offsets = [0]
        for piece in self._body:
            offsets.append(offsets[-1] + len(piece))
        control = [self.bos_token_id, self.eos_token_id]
        return {"control": control}, array.array("I", offsets).tobytes() + b"".join(self._body)

    def _split(self, data: bytes) -> List[int]:
        tokens, at = [], 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token = self._token_by_piece.get(data[at : at + length])
                if token is not None:
                    break
            assert token is not None
            tokens.append(token)
            at += length
        return tokens
