#!/usr/bin/env python3
"""Measures the first page of the run list for each filter of tests/it/store/filters.rs, over HTTP.

Fills a new database with generated runs, then requests the list with each filter from a server without a model. With --cold, the
first request follows a restart of PostgreSQL and the removal of the kernel's page cache (as root only).

    tests/benches/filters.py target/release/thunder postgres:///new?host=/run/postgresql [RUNS] [--cold COMMAND]

COMMAND restarts PostgreSQL. Prints medians in milliseconds, warm and cold, slowest first.
"""

import argparse
import json
import pathlib
import re
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request

TESTS = pathlib.Path(__file__).resolve().parent.parent / "it/store"
BATCH, ROUNDS = 50_000, 7


def filters():
    source = (TESTS / "filters.rs").read_text()
    listed = source.split("const FILTERS", 1)[1].split("\n];", 1)[0]
    names = re.findall(r'^    \(\s*("(?:[^"\\]|\\.)*"|NO_SURFACE)', listed, re.M)
    no_surface = re.search(r'const NO_SURFACE: &str = (".*");', source)[1]
    return [json.loads(no_surface if name == "NO_SURFACE" else name) for name in names]


def psql(url, sql):
    subprocess.run(["psql", url, "-XqAt", "-v", "ON_ERROR_STOP=1", "-c", sql], check=True, stdout=subprocess.DEVNULL)


def fill(url, runs):
    sql = (TESTS / "filters.sql").read_text()
    for first in range(1, runs + 1, BATCH):
        numbers = {"runs_to_make": runs, "first_run": first, "last_run": min(first + BATCH - 1, runs)}
        batch = sql
        for name, number in numbers.items():
            batch = batch.replace(name, str(number))
        psql(url, batch)
        print(f"{numbers['last_run']} runs made", flush=True)
    psql(url, "insert into run_keys (request_id, run_id) select request_id, run_id from runs")
    psql(url, "vacuum analyze")


class Server:
    def __init__(self, program, url):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen(
            [program, "serve", "--no-model", "--port", str(self.port), "--data-dir", self.folder.name, "--database-url", url],
            stderr=subprocess.DEVNULL,
        )
        while True:
            try:
                return self.get("/healthz") and None
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit(f"{program} ended with {self.process.returncode}")
                time.sleep(0.05)

    def get(self, path):
        started = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}") as response:
            response.read()
        return 1000 * (time.perf_counter() - started)

    def page(self, q):
        return self.get("/api/v1/runs?" + urllib.parse.urlencode({"q": q}))

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("url")
    parser.add_argument("runs", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--cold")
    parser.add_argument("--filled", action="store_true", help="the database is filled already")
    arguments = parser.parse_args()
    server = Server(arguments.program, arguments.url)
    if not arguments.filled:
        fill(arguments.url, arguments.runs)
    cold, warm = {}, {}
    for q in filters():
        if arguments.cold:
            server.stop()
            subprocess.run("sync; " + arguments.cold + "; echo 3 > /proc/sys/vm/drop_caches", shell=True, check=True)
            server = Server(arguments.program, arguments.url)
            cold[q] = server.page(q)
        warm[q] = statistics.median(server.page(q) for _ in range(ROUNDS))
    server.stop()
    for q in sorted(warm, key=lambda q: max(warm[q], cold.get(q, 0)), reverse=True):
        print(f"{warm[q]:8.1f} {cold.get(q, float('nan')):8.1f}  {q}")
    over = {name: sum(value > 100 for value in table.values()) for name, table in (("warm", warm), ("cold", cold))}
    print(f"{len(warm)} filters, above 100 ms: {over['warm']} warm, {over['cold']} cold")


if __name__ == "__main__":
    main()
