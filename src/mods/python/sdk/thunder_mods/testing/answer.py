"""The answer's text while it grows and shrinks, and how much of it a client has."""

from __future__ import annotations

import codecs
from typing import Any, Callable, List, Sequence, Tuple, Union


class Answer:
    """The text of the generated tokens."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], hidden: Callable[[int], bool]) -> None:
        self._piece: Callable[[int], bytes] = tokenizer.piece
        self._stop = [text.encode("utf-8") for text in stop]
        self._hidden = hidden
        self._sent = b""
        #: What the client got: texts, and numbers of characters to take back.
        self.sent: List[Union[str, int]] = []

    def text(self, tokens: Sequence[int]) -> str:
        """The answer: everything before the first stop string."""
        return self._upto_stop(tokens)[0].decode("utf-8", "replace")

    def stopped(self, tokens: Sequence[int]) -> bool:
        """Whether the text holds a stop string."""
        return self._upto_stop(tokens)[1]

    def send(self, tokens: Sequence[int], holdback: int) -> None:
        """Sends what may be seen: complete characters, nothing that may become a stop string, and not the last
        `holdback` tokens."""
        visible, stopped = self._upto_stop(tokens[: max(0, len(tokens) - holdback)])
        if not stopped:
            keep = max((n for stop in self._stop for n in range(1, len(stop)) if visible.endswith(stop[:n])), default=0)
            visible = visible[: len(visible) - keep]
        self._extend(codecs.getincrementaldecoder("utf-8")("replace").decode(visible).encode("utf-8"))

    def end(self, tokens: Sequence[int]) -> None:
        """Sends the rest."""
        self._extend(self.text(tokens).encode("utf-8"))

    def taken_back(self, tokens: Sequence[int]) -> None:
        """Only these tokens are left."""
        left = self.text(tokens).encode("utf-8")
        common = 0
        while common < min(len(left), len(self._sent)) and left[common] == self._sent[common]:
            common += 1
        gone = self._sent[common:].decode("utf-8", "replace")
        if gone:
            self.sent.append(len(gone))
            self._sent = self._sent[:common]

    def _extend(self, text: bytes) -> None:
        if text.startswith(self._sent) and len(text) > len(self._sent):
            self.sent.append(text[len(self._sent) :].decode("utf-8", "replace"))
            self._sent = text

    def _upto_stop(self, tokens: Sequence[int]) -> Tuple[bytes, bool]:
        data = b"".join(self._piece(token) for token in tokens if not self._hidden(token))
        places = [place for place in map(data.find, self._stop) if place >= 0]
        return (data[: min(places)], True) if places else (data, False)
