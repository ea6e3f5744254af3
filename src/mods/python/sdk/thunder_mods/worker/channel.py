"""Frames to and from the server, and the shared memory."""

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

#: Duration of polling after a reply, and after the expected time of a frame. Polling before that time takes twice as long.
_POLL_NS = 100_000
#: Maximum duration of a predicted wait. For longer waits, the time to wake up is negligible.
_MAX_PREDICTED_NS = 10_000_000
_yield = getattr(os, "sched_yield", lambda: None)
_LENGTHS = struct.Struct("<II")
#: Maximum header and body that the server accepts, in bytes.
_MAX_LENGTHS = (16 << 20, 64 << 20)
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode
_decode = json.JSONDecoder().decode


class PredictiveWait:
    """Waits for bytes, and polls when they are likely to arrive.

    A sleeping process takes longer to wake up than a mod takes to reply. One event often follows another immediately. The
    first event of a token arrives after the model's computation, which takes about the same time for each token.
    """

    def __init__(self) -> None:
        self._last: List[int] = []  # durations of the last longer waits, in ns
        self._skipped_waits = 0  # number of next waits without polling, because predictions were wrong
        self._penalty = 1

    def next(self, connection: socket.socket) -> bytes:
        """Returns the next bytes of the connection; empty if it is closed."""
        started_at = time.perf_counter_ns()
        data = self._poll(connection, started_at + _POLL_NS)
        if data is not None:
            return data
        expected = self._predict()
        if expected == 0:
            data = connection.recv(4096)
        else:
            sleep_ns = started_at + expected - 2 * _POLL_NS - time.perf_counter_ns()
            if sleep_ns > 0:
                select.select((connection,), (), (), sleep_ns / 1e9)
            data = self._poll(connection, started_at + expected + _POLL_NS)
            self._record_prediction(data is not None)
            if data is None:
                data = connection.recv(4096)
        self._last = self._last[-2:] + [time.perf_counter_ns() - started_at]
        return data

    def _predict(self) -> int:
        """Returns the predicted duration of this wait in ns, or 0 for a wait without polling."""
        if self._skipped_waits > 0:
            self._skipped_waits -= 1
            return 0
        expected = sorted(self._last)[1] if len(self._last) == 3 else 0
        return expected if expected <= _MAX_PREDICTED_NS else 0

    def _record_prediction(self, is_correct: bool) -> None:
        if is_correct:
            self._penalty = 1
        else:
            self._penalty = min(2 * self._penalty, 64)
            self._skipped_waits = self._penalty

    @staticmethod
    def _poll(connection: socket.socket, until: int) -> Optional[bytes]:
        """Polls for bytes until a point in time."""
        while True:
            try:
                return connection.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.perf_counter_ns() >= until:
                    return None
                _yield()


class Channel:
    """Channel of length-prefixed frames: u32 header length, u32 body length, header (JSON), body; little-endian."""

    def __init__(self, descriptor: int) -> None:
        self._socket: Optional[socket.socket] = socket.socket(fileno=descriptor)
        self._buffer = bytearray()
        self._wait = PredictiveWait()
        self._sending = threading.Lock()  # threads of the mod may log
        os.register_at_fork(after_in_child=self._close_in_child)

    def receive(self) -> Optional[Tuple[Dict[str, Any], bytes]]:
        """Returns the next (header, body), or None if the server has closed the channel."""
        if not self._buffer and self._socket is not None:
            # A frame almost always arrives alone and complete.
            try:
                data = self._wait.next(self._socket)
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
        """Sends a frame whose header is already encoded."""
        if self._socket is None:
            return
        for length, maximum in zip((len(header), len(body)), _MAX_LENGTHS):
            if length > maximum:
                raise ValueError("a message to the server has %d bytes; the maximum is %d" % (length, maximum))
        try:
            with self._sending:
                self._socket.sendall(_LENGTHS.pack(len(header), len(body)) + header + body)
        except OSError:
            os._exit(0)  # the server has ended

    def _close_in_child(self) -> None:
        """Closes the channel in a process forked by the mod: only the parent uses the protocol."""
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
    """Shared memory with tokens and logits."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: Optional[mmap.mmap] = None
        self._view: Any = None

    def view(self, offset: int, count: int, form: str) -> Any:
        """Returns a writable view of `count` numbers of format `form` (4 bytes each) from byte `offset` on."""
        end = offset + 4 * count
        if self._view is None or len(self._view) < end:
            # Views kept by a mod keep the old map alive.
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
            self._view = memoryview(self._map)
        return self._view[offset:end].cast(form)
