"""Capture of a mod's output and log lines. They are sent immediately, so that they are not lost if the call never returns."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any, List

_MAX_BYTES = 256 * 1024


class Capture:
    """Sends lines in the order in which they were written; the server attaches them to the current call."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._size = 0
        self._dropped = 0
        self._streams: List[Stream] = []

    def install(self, module: str) -> None:
        """Replaces sys.stdout and sys.stderr, and adds a handler to the root logger. `module` is the name of the mod's module."""
        self._streams = [Stream(self, "INFO"), Stream(self, "WARNING")]
        sys.stdout, sys.stderr = self._streams
        root = logging.getLogger()
        root.addHandler(Handler(self, module))
        root.setLevel(logging.DEBUG)

    def add(self, level: str, message: str) -> None:
        if self._size > _MAX_BYTES:
            self._dropped += 1
            return
        message = message[:_MAX_BYTES]
        self._size += len(message) + 1
        self._channel.send({"kind": "log", "level": level, "message": message})

    def end_lines(self) -> None:
        """Sends unfinished lines."""
        for stream in self._streams:
            stream.end_line()

    def end_call(self) -> None:
        """Sends unfinished lines and resets the size limit for the next call."""
        self.end_lines()
        if not self._size:
            return
        dropped, self._size, self._dropped = self._dropped, 0, 0
        if dropped:
            self.add("WARNING", "%d more lines were dropped; the maximum per call is %d KiB" % (dropped, _MAX_BYTES // 1024))


class Stream(io.TextIOBase):
    """Stream that collects printed text. Text printed by one call of `print` is one log entry, even with several lines."""

    def __init__(self, capture: Capture, level: str) -> None:
        self._capture = capture
        self._level = level
        self._text = ""

    encoding = "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError("write takes a str, got %s" % type(text).__name__)
        self._text += text
        if text.endswith("\n") or len(self._text) > _MAX_BYTES:
            self.end_line()
        return len(text)

    def end_line(self) -> None:
        text, self._text = self._text, ""
        if text.rstrip("\n"):
            self._capture.add(self._level, text.rstrip("\n"))


class Handler(logging.Handler):
    """Handler of log records; records below INFO are only accepted from the mod itself, not from libraries."""

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
        except Exception as error:  # an invalid format string must not end the call
            self._capture.add("ERROR", "a log line could not be formatted: %s" % error)
