"""Capture of a mod's output and log lines during a call."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Iterator, List, Tuple


class _Lines(io.TextIOBase):
    def __init__(self, level: str, lines: List[Tuple[str, str]]) -> None:
        self._level, self._lines, self._text = level, lines, ""

    def write(self, text: str) -> int:
        self._text += text
        if text.endswith("\n"):
            self.end_line()
        return len(text)

    def end_line(self) -> None:
        text, self._text = self._text.rstrip("\n"), ""
        if text:
            self._lines.append((self._level, text))


class _Handler(logging.Handler):
    def __init__(self, lines: List[Tuple[str, str]]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelname, self.format(record)))


@contextlib.contextmanager
def captured(lines: List[Tuple[str, str]], module: str) -> Iterator[None]:
    """Collects printed and logged lines."""
    out, err, handler = _Lines("INFO", lines), _Lines("WARNING", lines), _Handler(lines)
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
