"""Capture of a mod's output and log lines during a call."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Iterator, List, Tuple


class _Lines(io.TextIOBase):
    def __init__(self, level: str, into: List[Tuple[str, str]]) -> None:
        self._level, self._into, self._text = level, into, ""

    def write(self, text: str) -> int:
        self._text += text
        if text.endswith("\n"):
            self.end_line()
        return len(text)

    def end_line(self) -> None:
        text, self._text = self._text.rstrip("\n"), ""
        if text:
            self._into.append((self._level, text))


class _Handler(logging.Handler):
    def __init__(self, into: List[Tuple[str, str]]) -> None:
        super().__init__()
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        self._into.append((record.levelname, self.format(record)))


@contextlib.contextmanager
def captured(into: List[Tuple[str, str]], module: str) -> Iterator[None]:
    """Collects printed and logged lines."""
    out, err, handler = _Lines("INFO", into), _Lines("WARNING", into), _Handler(into)
    root, own = logging.getLogger(), logging.getLogger(module)
    level = own.level
    root.addHandler(handler)
    own.setLevel(logging.DEBUG)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    finally:
        out.end_line()
        err.end_line()
        own.setLevel(level)
        root.removeHandler(handler)
