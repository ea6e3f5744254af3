"""Frames to and from the server, and the memory shared with it."""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import struct
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

#: How long to stay awake for the next frame after an answer, and around the time when it is expected.
_MOMENT_NS = 100_000
#: Longer waits are not foreseen: beside them a wake-up costs nothing.
_LONGEST_FORESEEN_NS = 10_000_000
_yield = getattr(os, "sched_yield", lambda: None)
_LENGTHS = struct.Struct("<II")
#: Longest header and body that the server takes, in bytes.
_LONGEST = (16 << 20, 64 << 20)
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode
_decode = json.JSONDecoder().decode


class Patience:
    """Waits for bytes, awake when they are likely to come.

    A sleeping process takes longer to wake up than a mod takes to answer. One event often follows the other at once; the
    first one of a token comes when the model has computed it, which takes about as long each time.
    """

    def __init__(self) -> None:
        self._last: List[int] = []  # how long the last waits were that were longer than a moment, in ns
        self._trust = 0  # below 0: waits that are still slept through, since the last ones were not foreseen
        self._doubt = 1

    def next(self, connection: socket.socket) -> bytes:
        """The next bytes of the connection; none when it is closed."""
        begun = time.perf_counter_ns()
        data = self._look(connection, begun + _MOMENT_NS)
        if data is not None:
            return data
        expected = self._foresee()
        if expected == 0:
            data = connection.recv(4096)
        else:
            doze = begun + expected - 2 * _MOMENT_NS - time.perf_counter_ns()
            if doze > 0:
                select.select((connection,), (), (), doze / 1e9)
            data = self._look(connection, begun + expected + _MOMENT_NS)
            self._judge(data is not None)
            if data is None:
                data = connection.recv(4096)
        self._last = self._last[-2:] + [time.perf_counter_ns() - begun]
        return data

    def _foresee(self) -> int:
        """How long this wait is likely to be; 0 to sleep through it, which counts against what is slept through after a wrong guess."""
        if self._trust < 0:
            self._trust += 1
            return 0
        expected = sorted(self._last)[1] if len(self._last) == 3 else 0
        return expected if expected <= _LONGEST_FORESEEN_NS else 0

    def _judge(self, right: bool) -> None:
        if right:
            self._doubt = 1
        else:
            self._doubt = min(2 * self._doubt, 64)
            self._trust = -self._doubt

    @staticmethod
    def _look(connection: socket.socket, until: int) -> Optional[bytes]:
        """Bytes that come before that time."""
        while True:
            try:
                return connection.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.perf_counter_ns() >= until:
                    return None
                _yield()


class Channel:
    """Length-prefixed frames: u32 header length, u32 body length, header (JSON), body; little-endian."""

    def __init__(self, descriptor: int) -> None:
        self._socket: Optional[socket.socket] = socket.socket(fileno=descriptor)
        self._buffer = bytearray()
        self._await = Patience()
        self._sending = threading.Lock()  # a thread of the mod may log
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def receive(self) -> Optional[Tuple[Dict[str, Any], bytes]]:
        """The next (header, body), or None when the server has gone."""
        if not self._buffer and self._socket is not None:
            # Nearly always a frame comes alone and at once.
            try:
                data = self._await.next(self._socket)
            except OSError:
                return None
            if len(data) >= _LENGTHS.size:
                header_length, body_length = _LENGTHS.unpack_from(data)
                if body_length == 0 and len(data) == _LENGTHS.size + header_length:
                    return _decode(data[_LENGTHS.size :].decode()), b""
            if not data:
                return None
            self._buffer += data
        if not self._fill(_LENGTHS.size):
            return None
        header_length, body_length = _LENGTHS.unpack_from(self._buffer)
        total = _LENGTHS.size + header_length + body_length
        if not self._fill(total):
            return None
        header = _decode(self._buffer[_LENGTHS.size : _LENGTHS.size + header_length].decode())
        body = bytes(self._buffer[_LENGTHS.size + header_length : total])
        del self._buffer[:total]
        return header, body

    def send(self, header: Dict[str, Any], body: bytes = b"") -> None:
        """Sends a frame."""
        self.send_encoded(_encode(header).encode("utf-8", "replace"), body)

    def send_encoded(self, header: bytes, body: bytes = b"") -> None:
        """Sends a frame whose header is JSON already."""
        if self._socket is None:
            return
        for length, longest in zip((len(header), len(body)), _LONGEST):
            if length > longest:
                raise ValueError("what is sent to the server has %d bytes, at most %d are taken" % (length, longest))
        try:
            with self._sending:
                self._socket.sendall(_LENGTHS.pack(len(header), len(body)) + header + body)
        except OSError:
            os._exit(0)  # the server has gone

    def _leave_to_parent(self) -> None:
        """In a process that a mod forked: the protocol is not its own."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _fill(self, length: int) -> bool:
        while len(self._buffer) < length:
            if self._socket is None:
                return False
            try:
                data = self._socket.recv(max(65536, length - len(self._buffer)))
            except OSError:
                return False
            if not data:
                return False
            self._buffer += data
        return True


class Memory:
    """Tokens and logits, where the server puts them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: Optional[mmap.mmap] = None
        self._view: Any = None

    def view(self, offset: int, count: int, form: str) -> Any:
        """`count` numbers of format `form` (4 bytes each) from byte `offset` on, writable."""
        end = offset + 4 * count
        if self._view is None or len(self._view) < end:
            # Views that a mod kept hold the old map; it goes with them.
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
            self._view = memoryview(self._map)
        return self._view[offset:end].cast(form)
