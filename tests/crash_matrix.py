#!/usr/bin/env python3
"""Kills servers, PostgreSQL and mod workers under load, and counts acknowledged writes that are lost.

Two servers share the database of a third one without a model. Clients ingest documents and request completions that must
be recorded; every acknowledged write must exist at the end.

    tests/crash_matrix.py target/debug/thunder [KILLS_OF_EACH]
"""

import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

PROGRAM, KILLS = os.path.abspath(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20
ROOT = pathlib.Path(__file__).resolve().parent
FOLDER = pathlib.Path(tempfile.mkdtemp(prefix="thunder-crash-", dir="/tmp"))
FOLDER.chmod(0o755)  # root's database runs as another user
MODEL, MODS = ROOT.parent / "fixtures/models/tiny.gguf", ROOT / "it/mods"
DOCUMENT = {
    "events": [
        {"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 3, "max_steps": 10},
        {"event_type": "Sampled", "step": 1, "sequence_order": 1, "sampled_token": 7, "token_text": " there"},
        {"event_type": "Added", "step": 1, "sequence_order": 2, "added_tokens": [7], "added_token_count": 1, "forced": False},
    ],
    "mod_calls": [], "mod_logs": [], "actions": [],
}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    def __init__(self, name, *arguments):
        self.folder, self.port = FOLDER / name, free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.folder.mkdir()
        self.command = [PROGRAM, "serve", "--listen", f"127.0.0.1:{self.port}", "--data-dir", str(self.folder), *arguments]

    def start(self):
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        return self

    def wait_ready(self):
        begun = time.monotonic()
        while request(self.base + "/healthz")[0] != 200:
            if self.process.poll() is not None:
                self.start()  # PostgreSQL was unavailable
            if time.monotonic() - begun > 120:
                sys.exit(f"{self.folder} is not ready; see its log")
            time.sleep(0.05)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def workers(self):
        """Returns the processes of its Python mods."""
        parents, found = {}, []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                pass
        below = {self.process.pid}
        for _ in range(4):
            below |= {pid for pid, parent in parents.items() if parent in below}
        for pid in below - {self.process.pid}:
            try:
                if b"python" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
            except OSError:
                pass
        return found


def request(url, body=None, timeout=60):
    data = None if body is None else json.dumps(body).encode()
    sent = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(sent, timeout=timeout) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()
    except (OSError, ValueError) as error:
        return 0, {}, str(error).encode()
    except Exception as error:  # an interrupted response
        return 0, {}, repr(error).encode()


ingested, generated, refused = [], [], []
stop = threading.Event()


def ingest(servers, numbers=itertools.count()):
    while not stop.is_set():
        request_id = f"ingest-{next(numbers)}"
        document = {"request": {"request_id": request_id, "created_at": "2025-12-01T18:30:00Z"}, **DOCUMENT}
        status, _, _ = request(random.choice(servers).base + "/ingest", document)
        (ingested if status == 201 else refused).append(request_id)
        if status != 201:
            time.sleep(0.05)


def generate(servers):
    body = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "record": "required"}
    while not stop.is_set():
        mods = random.choice([[], ["replace_start"]])
        status, headers, answer = request(random.choice(servers).base + "/v1/completions", {**body, "mods": mods})
        if status == 200:
            generated.append((headers["x-thunder-run-id"], json.loads(answer)["choices"][0]["text"]))
        else:
            refused.append(status)
            time.sleep(0.05)


def main():
    database = Server("database", "--no-model").start()
    database.wait_ready()
    pid_file = database.folder / "postgres/data/postmaster.pid"
    directory = pid_file.read_text().splitlines()[4].replace("/", "%2F")
    url = f"postgres://thunder@{directory}/thunder"
    flags = ["--model", str(MODEL), "--threads", "1", "--mods-dir", str(MODS), "--database-url", url]
    servers = [Server(name, *flags).start() for name in ("a", "b")]
    for server in servers:
        server.wait_ready()
    threads = [threading.Thread(target=ingest, args=[[*servers, database]]) for _ in range(3)]
    threads += [threading.Thread(target=generate, args=[servers]) for _ in range(4)]
    for thread in threads:
        thread.start()
    killed = {"server": 0, "postgres": 0, "worker": 0}
    order = [kind for kind in killed for _ in range(KILLS)]
    random.shuffle(order)
    for kind in order:
        time.sleep(random.uniform(0.5, 2))
        victim = servers[sum(killed.values()) % 2]
        if kind == "server":
            victim.kill()
            victim.start()
            victim.wait_ready()
        elif kind == "postgres":
            os.kill(int(pid_file.read_text().split()[0]), signal.SIGKILL)
            time.sleep(0.5)
            for server in [database, *servers]:
                server.wait_ready()
        else:
            workers = victim.workers()
            while not workers:
                time.sleep(0.1)
                workers = victim.workers()
            for worker in workers:
                try:
                    os.kill(worker, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        killed[kind] += 1
        print(f"killed {killed}: {len(ingested)} ingested, {len(generated)} generated, {len(refused)} refused", flush=True)
    stop.set()
    for thread in threads:
        thread.join()
    lost, wrong = [], []
    for request_id in ingested:
        if request(f"{database.base}/api/v1/runs/{request_id}")[0] != 200:
            lost.append(request_id)
    for run_id, text in generated:
        status, _, answer = request(f"{database.base}/api/v1/runs/{run_id}")
        if status != 200:
            lost.append(run_id)
        else:
            run = json.loads(answer)["run"]
            if run["status"] != "done" or run["completion_tokens"] == 0:
                wrong.append((run_id, run["status"]))
    begun = time.monotonic()
    while (running := json.loads(request(f"{database.base}/api/v1/runs?q=status:running")[2])["runs"]) and time.monotonic() - begun < 30:
        time.sleep(0.5)
    for server in [*servers, database]:
        server.process.terminate()
        server.process.wait()
    print(
        f"{killed}; {len(ingested)} documents and {len(generated)} answers acknowledged, {len(refused)} requests refused; "
        f"{len(lost)} lost, {len(wrong)} in a wrong state, {len(running)} still running after 30 s"
    )
    print(*lost, *wrong, sep="\n")
    if lost or wrong or running:
        sys.exit(f"see {FOLDER}")
    shutil.rmtree(FOLDER)


main()
