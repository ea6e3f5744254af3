#!/usr/bin/env python3
"""Streams a run over WS /generate and changes it while it runs; needs nothing but Python 3.9.

    python3 tests/examples/stream.py "Once upon a time" [http://127.0.0.1:6767]

If the server has keys, set the environment variable THUNDER_API_KEY. The class Socket keeps the example free of packages; in a
program of your own, use a WebSocket client such as the package `websockets`.
"""
import base64
import json
import os
import socket
import struct
import sys
from urllib.parse import urlsplit


class Socket:
    """A client of RFC 6455 for text messages."""

    def __init__(self, base):
        url = urlsplit(base)
        self.tcp = socket.create_connection((url.hostname, url.port or 80))
        self.file = self.tcp.makefile("rb")
        head = (
            f"GET /generate HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}\r\n"
        )
        if key := os.environ.get("THUNDER_API_KEY"):
            head += f"Authorization: Bearer {key}\r\n"
        self.tcp.sendall(head.encode() + b"\r\n")
        status = self.file.readline()
        if b" 101 " not in status:
            raise ConnectionError(status.decode().strip())
        while self.file.readline() != b"\r\n":
            pass

    def frame(self, opcode, payload):
        mask = os.urandom(4)
        size = len(payload)
        length = bytes([0x80 | size]) if size < 126 else b"\xfe" + struct.pack("!H", size) if size < 65536 else b"\xff" + struct.pack("!Q", size)
        self.tcp.sendall(bytes([0x80 | opcode]) + length + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(payload)))

    def send(self, message):
        self.frame(1, json.dumps(message).encode())

    def __iter__(self):
        while True:
            opcode, size = self.file.read(2)
            if size == 126:
                (size,) = struct.unpack("!H", self.file.read(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self.file.read(8))
            payload = self.file.read(size)
            if opcode & 15 == 1:
                yield json.loads(payload)
            elif opcode & 15 == 9:
                self.frame(10, payload)
            elif opcode & 15 == 8:
                return


def main(prompt, base="http://127.0.0.1:6767"):
    connection = Socket(base)
    connection.send({
        "type": "config",
        "prompt": prompt,
        "parameters": {"max_tokens": 60, "temperature": 0.7},
        "options": {"generated_text": "delta"},
    })
    text, changed, ended = "", False, False
    for message in connection:
        kind = message["type"]
        if kind == "init":
            print(f"run {message['run_id']} of {message['model']}", file=sys.stderr)
        elif kind == "token":
            text += message["token"]
            if message["index"] == 10:
                changed = True
                connection.send({"type": "control", "action": "modify", "parameters": {"temperature": 0.2}})
        elif kind == "backtrack":
            text = text[: len(text) - message["removed_characters"]]
        elif kind == "status":
            print(f"{message['operation']}: {message['message']}", file=sys.stderr)
            if message["operation"] == "feedback":
                break
        elif kind == "completion":
            ended = True
            assert text == message["generated_text"]
            print(text)
            print(message["finish_reason"], message["usage"], file=sys.stderr)
            connection.send({"type": "feedback", "rating": 1, "text": "from the example"})
        elif kind == "error" and not ended:
            if changed and message["error"] == "invalid_request":
                continue  # the run ended before the change arrived; its completion follows
            sys.exit(f"{message['error']}: {message['message']}")
    connection.frame(8, struct.pack("!H", 1000))


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["Once upon a time"]))
