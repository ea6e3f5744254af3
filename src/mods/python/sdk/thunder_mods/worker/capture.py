"""What a mod prints and logs, sent at once, so that it is not lost when the call never returns."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any, List

_MOST_BYTES = 256 * 1024


class Capture:
    """Sends lines in the order in which they were written; the server attaches them to the call that it waits for."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._size = 0
        self._dropped = 0
        self._streams: List[Stream] = []

    def install(self, module: str) -> None:
        """Takes over sys.stdout, sys.stderr and the root logger. `module` is the mod's module name."""
        self._streams = [Stream(self, "INFO"), Stream(self, "WARNING")]
        sys.stdout, sys.stderr = self._streams
        root = logging.getLogger()
        root.addHandler(Handler(self, module))
        root.setLevel(logging.DEBUG)

    def add(self, level: str, message: str) -> None:
        if self._size > _MOST_BYTES:
            self._dropped += 1
            return
        message = message[:_MOST_BYTES]
        self._size += len(message) + 1
        self._channel.send({"kind": "log", "level": level, "message": message})

    def end_lines(self) -> None:
        """Sends lines that have no end yet."""
        for stream in self._streams:
            stream.end_line()

    def end_call(self) -> None:
        """Sends what is still unfinished; the next call has its own bound."""
        self.end_lines()
        if not self._size:
            return
        dropped, self._size, self._dropped = self._dropped, 0, 0
        if dropped:
            self.add("WARNING", "%d more lines were dropped; a call can log %d KiB" % (dropped, _MOST_BYTES // 1024))


class Stream(io.TextIOBase):
    """Collects what is printed; a text that is printed at once is one line of the log, also when it has several."""

    def __init__(self, capture: Capture, level: str) -> None:
        self._capture = capture
        self._level = level
        self._text = ""

    encoding = "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError("write takes a text, not %s" % type(text).__name__)
        self._text += text
        if text.endswith("\n") or len(self._text) > _MOST_BYTES:
            self.end_line()
        return len(text)

    def end_line(self) -> None:
        text, self._text = self._text, ""
        if text.rstrip("\n"):
            self._capture.add(self._level, text.rstrip("\n"))


class Handler(logging.Handler):
    """Log records; those below INFO only from the mod itself, not from libraries."""

    def __init__(self, capture: Capture, module: str) -> None:
        super().__init__()
        self._capture = capture
        self._own = ("root", module)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.INFO and not record.name.startswith(self._own):
            return
        self._capture.end_lines()
        level = "DEBUG"
        for threshold, name in ((logging.ERROR, "ERROR"), (logging.WARNING, "WARNING"), (logging.INFO, "INFO")):
            if record.levelno >= threshold:
                level = name
                break
        try:
            self._capture.add(level, self.format(record))
        except Exception as error:  # a wrong format string must not end the call
            self._capture.add("ERROR", "a log line could not be formatted: %s" % error)
