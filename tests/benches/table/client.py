"""Servers under measurement, and streamed completions of several clients at once."""

import json
import os
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

START_TIMEOUT = 180.0


class Server:
    """A running server with its own port; Thunder also has its own data directory."""

    def __init__(self, program, arguments, name):
        self.name, self.folder = name, None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [str(program)]
        if name == "thunder":
            self.folder = Path(tempfile.mkdtemp(prefix="thunder-table-"))
            self.folder.chmod(0o755)  # root's database runs as another user
            command += ["serve", "--data-dir", str(self.folder)]
        self.command = [*command, *arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = None

    def start(self):
        """Starts the program. Returns the seconds until it is ready."""
        begun = time.monotonic()
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self.is_ready():
            if self.process.poll() is not None:
                sys.exit(f"{self.name} ended with {self.process.returncode} at its start: {' '.join(self.command)}")
            if time.monotonic() - begun > START_TIMEOUT:
                self.stop()
                sys.exit(f"{self.name} is not ready after {START_TIMEOUT:.0f} s")
            time.sleep(0.005)
        return time.monotonic() - begun

    def is_ready(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self):
        """Stops the program gracefully, so that an embedded database stops with it."""
        self.process.terminate()
        self.process.wait()

    def close(self):
        """Stops the program and removes its data."""
        if self.process is not None and self.process.poll() is None:
            self.stop()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class Stream:
    """A streamed completion. Its chunks are stored as they arrive, and parsed after the measurement."""

    def __init__(self, server, prompt, count, seed, fields):
        body = {
            "prompt": prompt, "max_tokens": count, "stream": True, "ignore_eos": True, "cache_prompt": False,
            "temperature": 0.8, "seed": seed, "stream_options": {"include_usage": True}, **fields,
        }
        body = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
        self.request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
        self.socket = socket.create_connection(("127.0.0.1", server.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name, self.pieces = server.name, []

    def send(self):
        self.sent = time.perf_counter()
        self.socket.sendall(self.request)
        self.socket.setblocking(False)

    def read(self):
        """Reads the available bytes. Returns False at the end of the stream."""
        data = self.socket.recv(1 << 16)
        self.pieces.append((time.perf_counter(), data))
        if not data:
            self.socket.close()
        return bool(data)

    def parse(self, count, prompt_tokens):
        """Computes the times at which text arrived, and checks the number of tokens."""
        self.times, usage, unread = [], None, b""
        for at, data in self.pieces:
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                # The lines between events are the sizes of the response's chunks.
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[len(b"data: "):])
                usage = chunk.get("usage") or usage
                if any(choice.get("text") for choice in chunk.get("choices", ())):
                    self.times.append(at)
        seen = usage and (usage["prompt_tokens"], usage["completion_tokens"])
        if seen != (prompt_tokens, count) or not self.times:
            received = b"".join(data for _, data in self.pieces)[:300]
            sys.exit(f"{self.name} answered {seen} tokens, expected {(prompt_tokens, count)}: {received!r}")
        # A piece of text is one token, or more after incomplete characters.
        self.tokens_per_piece = count / len(self.times)


def complete(server, prompts, count, seed, fields):
    """Sends all prompts at once, with further fields in the requests, and reads the answers to their end."""
    streams = [Stream(server, prompt, count, seed, fields) for prompt in prompts]
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            stream.send()
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.fileobj)
    return streams


def measure(server, prompts, prompt_tokens, count, seed, **fields):
    """Measures one round; `fields` are added to the requests. Returns `whole` and `generation` in tokens per second, and the waits for first tokens in seconds."""
    streams = complete(server, prompts, count, seed, fields)
    for stream in streams:
        stream.parse(count, prompt_tokens)
    sent = min(stream.sent for stream in streams)
    end = max(stream.times[-1] for stream in streams)
    # While all streams generate.
    begin, first_end = max(stream.times[0] for stream in streams), min(stream.times[-1] for stream in streams)
    together = sum(sum(begin < at <= first_end for at in stream.times) * stream.tokens_per_piece for stream in streams)
    waits = [stream.times[0] - stream.sent for stream in streams]
    return {
        "whole": len(streams) * count / (end - sent),
        "generation": together / (first_end - begin) if first_end > begin else None,
        "first": statistics.median(waits),
        "last": max(waits),
    }


def memory(pid):
    """Returns the resident memory of a process in megabytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def executable(path, what, flag):
    """Returns the path of a program, or ends with a message."""
    if not path:
        sys.exit(f"{what} not found: give its path with {flag}")
    path = Path(path).resolve()
    if not os.access(path, os.X_OK) or path.is_dir():
        sys.exit(f"{what} not found: no program at {path}; {flag} sets another path")
    return path
