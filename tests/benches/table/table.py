#!/usr/bin/env python3
"""Measures Thunder and llama-server side by side, and writes a Markdown table.

Both servers run at the same time and answer the same requests in alternating rounds; a cell is the median of the rounds'
ratios, above 1 if Thunder is better. Thunder records into its embedded database. Cells that `--results` already has
are not measured again.

    tests/benches/table/table.py --thunder target/release/thunder --rival PATH/llama-server [--quick]

llama-server comes with the sources of PyPI's `llama-cpp-python` (vendor/llama.cpp); build its targets `llama-server` and
`llama-quantize` with the compiler flags of `.cargo/config.toml` and GGML_NATIVE.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import client
import models

ROOT = Path(__file__).resolve().parents[3]
NAMES = ["15M-F16", "15M-Q4_0", "110M-F16", "110M-Q8_0", "110M-Q4_0"]
VALUES = ("whole", "generation", "first", "last")
# Pause after a round, so that Thunder's recording does not overlap with the rival's round.
PAUSE = 0.25


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--thunder", default=ROOT / "target/release/thunder", help="Thunder's release build")
    parser.add_argument("--rival", help="llama-server")
    parser.add_argument("--quantize", help="llama-quantize; default: beside llama-server")
    parser.add_argument("--models", default=",".join(NAMES), help="sizes with types, such as 110M-Q4_0")
    parser.add_argument("--prompts", default="64+96,512+32", help="tokens of the prompt and of the answer")
    parser.add_argument("--streams", default="1,4,8", help="numbers of requests at once")
    parser.add_argument("--threads", default="1,default", help="values of --threads; `default` sets none")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds of a cell, at least 9 for a table")
    parser.add_argument("--quick", action="store_true", help="a few cells with 3 rounds")
    parser.add_argument("--slots", type=int, default=8, help="value of --parallel")
    parser.add_argument("--context", type=int, default=8192, help="value of --ctx-size")
    parser.add_argument("--flags", default="", help="further flags for both servers")
    parser.add_argument("--thunder-flags", default="", help="further flags for Thunder only")
    parser.add_argument("--folder", type=Path, default=ROOT / "target/bench-table", help="folder of models and results")
    parser.add_argument("--results", type=Path, help="JSON file of measured cells; default: in the folder")
    parser.add_argument("--starts", type=int, default=9, help="measured starts of each program; 0 measures none")
    parser.add_argument("--seconds", type=float, help="stop before the first cell that begins later")
    args = parser.parse_args()
    if args.quick:
        args.models, args.prompts, args.streams, args.threads, args.rounds = "15M-F16", "64+96", "1,4", "1,default", 3
        args.starts = min(args.starts, 3)
    args.results = args.results or args.folder / ("quick.json" if args.quick else "results.json")
    return args


def flags(args, model, threads):
    values = ["--model", model, "--ctx-size", args.context, "--parallel", args.slots, "--cache-ram", 0]
    if threads != "default":
        values += ["--threads", threads]
    return [str(value) for value in values] + args.flags.split()


def servers(args, model, threads):
    """Returns both servers, Thunder first. They are not started yet."""
    common = flags(args, model, threads)
    return [
        client.Server(args.thunder, common + args.thunder_flags.split(), "thunder"),
        client.Server(args.rival, common, "llama-server"),
    ]


def measure_cell(pair, prompt_tokens, count, streams, rounds):
    """Returns the values of all rounds of each server. The first round is a warm-up. The servers take turns in starting a round."""
    seen = {server.name: {value: [] for value in VALUES} for server in pair}
    for turn in range(rounds + 1):
        prompts = [models.text(prompt_tokens, turn * streams + stream) for stream in range(streams)]
        for server in pair if turn % 2 else pair[::-1]:
            measured = client.measure(server, prompts, prompt_tokens, count, turn)
            time.sleep(PAUSE)
            if turn > 0:
                for value in VALUES:
                    seen[server.name][value].append(measured[value])
    return seen


def measure_starts(args, model, count):
    """Returns the seconds from the start of each program until it is ready: Thunder with an empty and with a used data directory."""
    seen = {"cold": [], "thunder": [], "llama-server": []}
    for _ in range(count):
        pair = servers(args, model, "default")
        with contextlib.ExitStack() as stack:
            for server in pair:
                stack.callback(server.close)
            thunder, rival = pair
            seen["cold"].append(thunder.start())
            thunder.stop()
            seen["thunder"].append(thunder.start())
            thunder.stop()
            seen["llama-server"].append(rival.start())
    return seen


def measure_idle(args):
    """Returns the memory of Thunder's process without a model in megabytes, some time after its start."""
    server = client.Server(args.thunder, ["--no-model"], "thunder")
    with contextlib.closing(server):
        server.start()
        time.sleep(5)
        return client.memory(server.process.pid)


def ratios(value, seen):
    """Returns the ratio of Thunder to llama-server in each round; above 1, Thunder is better."""
    pairs = zip(seen["thunder"][value], seen["llama-server"][value])
    pairs = [(ours, theirs) for ours, theirs in pairs if ours and theirs]
    return [theirs / ours if value in ("first", "last") else ours / theirs for ours, theirs in pairs]


def machine():
    try:
        processor = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t :")
    except OSError:
        processor = platform.processor() or platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores of {processor or 'an unknown processor'}"


def median(values):
    return statistics.median(values) if values else float("nan")


def render(results):
    """Returns the results as Markdown."""
    info = results["info"]
    lines = [
        f"{info['machine']}, {info['date']}; {info['rounds']} rounds. `{info['flags']}` on both sides. "
        "Each ratio is the median of the rounds' ratios; above 1, Thunder is better. In brackets: the medians of Thunder / llama-server.",
        "",
        "| Model | Prompt + answer | Threads | Streams | Whole request (tokens/s) | Generation | First token, median (ms) "
        "| First token, last stream |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, seen in results["cells"].items():
        model, prompt, threads, streams = key.split(" ")
        middle = {value: median(ratios(value, seen)) for value in VALUES}
        whole = " / ".join(f"{median(seen[name]['whole']):.0f}" for name in ("thunder", "llama-server"))
        first = " / ".join(f"{1e3 * median(seen[name]['first']):.1f}" for name in ("thunder", "llama-server"))
        lines.append(
            f"| {model.replace('-', ' ')} | {prompt} | {threads} | {streams} | {middle['whole']:.2f} ({whole}) "
            f"| {middle['generation']:.2f} | {middle['first']:.2f} ({first}) | {middle['last']:.2f} |"
        )
    if starts := results.get("starts"):
        cold, warm, rival = (median(starts[name]) for name in ("cold", "thunder", "llama-server"))
        lines += [
            "",
            "| From the start until `/health` is 200 | Median, seconds | Slowest |",
            "|---|---|---|",
            f"| Thunder, empty data directory: creates its database | {cold:.2f} | {max(starts['cold']):.2f} |",
            f"| Thunder, used data directory | {warm:.2f} | {max(starts['thunder']):.2f} |",
            f"| llama-server | {rival:.2f} | {max(starts['llama-server']):.2f} |",
        ]
    if idle := results.get("idle"):
        lines += ["", f"Thunder's process without a model takes {idle:.0f} MB when idle."]
    return "\n".join(lines) + "\n"


def main():
    args = arguments()
    args.thunder = client.executable(args.thunder, "Thunder's release build", "--thunder")
    args.rival = client.executable(args.rival, "llama-server", "--rival")
    args.quantize = client.executable(args.quantize or args.rival.with_name("llama-quantize"), "llama-quantize", "--quantize")
    args.folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    results = json.loads(args.results.read_text()) if args.results.exists() else {"cells": {}}
    shown = " ".join(flags(args, "MODEL", "default")[2:])
    results["info"] = {"machine": machine(), "date": f"{datetime.date.today()}", "rounds": args.rounds, "flags": shown}
    save = lambda: args.results.write_text(json.dumps(results, indent=1))  # noqa: E731

    for name, threads in itertools.product(args.models.split(","), args.threads.split(",")):
        cells = [
            (f"{name} {prompt} {threads} {streams}", prompt, int(streams))
            for prompt, streams in itertools.product(args.prompts.split(","), args.streams.split(","))
        ]
        cells = [cell for cell in cells if cell[0] not in results["cells"]]
        if not cells:
            continue
        with contextlib.ExitStack() as stack:
            pair = servers(args, models.prepare(args.folder, name, args.quantize), threads)
            for server in pair:
                stack.callback(server.close)
                server.start()
            for key, prompt, streams in cells:
                if args.seconds and time.monotonic() - begun > args.seconds:
                    sys.exit(f"stopped before {key}: {args.seconds:.0f} s are over")
                prompt_tokens, count = map(int, prompt.split("+"))
                seen = results["cells"][key] = measure_cell(pair, prompt_tokens, count, streams, args.rounds)
                save()
                shown = " ".join(f"{value} {median(ratios(value, seen)):.2f}" for value in VALUES)
                print(f"{key}: {shown}", file=sys.stderr, flush=True)
    if args.starts and "starts" not in results:
        model = models.prepare(args.folder, args.models.split(",")[0], args.quantize)
        results["starts"], results["idle"] = measure_starts(args, model, args.starts), measure_idle(args)
        save()
    table = args.results.with_suffix(".md")
    table.write_text(render(results))
    print(table.read_text(), end="")


if __name__ == "__main__":
    main()
