"""Text of the answer while tokens are added and removed, and the text that a client has received."""

from __future__ import annotations

import codecs
from typing import Any, Callable, List, Sequence, Tuple, Union


class Answer:
    """Text of the generated tokens."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], hidden: Callable[[int], bool]) -> None:
        self._piece: Callable[[int], bytes] = tokenizer.piece
        self._stop = [text.encode("utf-8") for text in stop]
        self._hidden = hidden
        self._sent = b""
        #: Messages to the client: texts, and numbers of characters to remove.
        self.sent: List[Union[str, int]] = []

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text before the first stop string."""
        return self._before_stop(tokens)[0].decode("utf-8", "replace")

    def sent_tokens(self, tokens: Sequence[int]) -> int:
        """Returns the number of first tokens whose text was sent completely."""
        length = 0
        for index, token in enumerate(tokens):
            length += 0 if self._hidden(token) else len(self._piece(token))
            if length > len(self._sent):
                return index
        return len(tokens)

    def stopped(self, tokens: Sequence[int]) -> bool:
        """Returns True if the text contains a stop string."""
        return self._before_stop(tokens)[1]

    def send(self, tokens: Sequence[int], holdback: int) -> None:
        """Sends complete characters that cannot become part of a stop string, without the last `holdback` tokens."""
        visible, stopped = self._before_stop(tokens[: max(0, len(tokens) - holdback)])
        if not stopped:
            keep = max((n for stop in self._stop for n in range(1, len(stop)) if visible.endswith(stop[:n])), default=0)
            visible = visible[: len(visible) - keep]
        self._extend(codecs.getincrementaldecoder("utf-8")("replace").decode(visible).encode("utf-8"))

    def end(self, tokens: Sequence[int]) -> None:
        """Sends the remaining text, and retracts sent text that is not part of it."""
        self.retract(tokens)
        self._extend(self.text(tokens).encode("utf-8"))

    def retract(self, tokens: Sequence[int]) -> None:
        """Retracts sent text after a removal; `tokens` are the remaining tokens."""
        remaining = self.text(tokens).encode("utf-8")
        common = 0
        while common < min(len(remaining), len(self._sent)) and remaining[common] == self._sent[common]:
            common += 1
        removed = self._sent[common:].decode("utf-8", "replace")
        if removed:
            self.sent.append(len(removed))
            self._sent = self._sent[:common]

    def _extend(self, text: bytes) -> None:
        if text.startswith(self._sent) and len(text) > len(self._sent):
            self.sent.append(text[len(self._sent) :].decode("utf-8", "replace"))
            self._sent = text

    def _before_stop(self, tokens: Sequence[int]) -> Tuple[bytes, bool]:
        data = b"".join(self._piece(token) for token in tokens if not self._hidden(token))
        positions = [position for position in map(data.find, self._stop) if position >= 0]
        return (data[: min(positions)], True) if positions else (data, False)
