#!/usr/bin/env python3
"""Measures the capture modes of attention, and writes a Markdown table.

One server for each mode runs at the same time. In each round, every server answers the same streamed requests, first without attention
and then with the attention of every layer and head captured and recorded. A cell is the median of the rounds' ratios to the server with
`--attention off`; above 1, the mode is faster.

    tests/benches/table/modes.py --model 1B-F16 --flags '--gpu-layers all'
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

import client
import models

ROOT = Path(__file__).resolve().parents[3]
BASELINE = "off"
MODES = {"off": ["--attention", "off"], "flash": ["--flash-attn", "on"], "on": ["--attention", "on"]}
PAUSE = 0.25


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--thunder", default=ROOT / "target/release/thunder", help="Thunder's release build")
    parser.add_argument("--quantize", help="llama-quantize, for quantized models")
    parser.add_argument("--model", default="110M-F16", help="size with type, such as 1B-F16")
    parser.add_argument("--prompts", default="512+64,3900+64", help="tokens of the prompt and of the answer")
    parser.add_argument("--streams", default="1,8", help="numbers of requests at once")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of a cell")
    parser.add_argument("--flags", default="", help="further flags of the servers")
    parser.add_argument("--folder", type=Path, default=ROOT / "target/bench-table", help="folder of the model")
    parser.add_argument("--results", type=Path, help="JSON file for the measured values")
    return parser.parse_args()


def measure_cell(servers, prompt_tokens, count, streams, rounds):
    """Returns the tokens per second during generation of each round, by mode and by `attention` of the requests. The first round is a
    warm-up."""
    seen = {}
    for turn in range(rounds + 1):
        prompts = [models.text(prompt_tokens, turn * streams + stream) for stream in range(streams)]
        for mode, server in servers.items():
            for attention in (False, True) if mode != BASELINE else (False,):
                fields = {"attention": True} if attention else {}
                measured = client.measure(server, prompts, prompt_tokens, count, turn, **fields)
                time.sleep(PAUSE)
                if turn > 0 and measured["generation"]:
                    seen.setdefault(f"{mode} {attention}", []).append(measured["generation"])
    return seen


def ratio(seen, key):
    baseline = seen.get(f"{BASELINE} False", [])
    pairs = list(zip(seen.get(key, []), baseline))
    return statistics.median(ours / base for ours, base in pairs) if pairs else float("nan")


def main():
    args = arguments()
    program = client.executable(args.thunder, "Thunder's release build", "--thunder")
    streams = [int(count) for count in args.streams.split(",")]
    cells = [tuple(map(int, prompt.split("+"))) for prompt in args.prompts.split(",")]
    context = max(map(sum, cells)) + 1
    args.folder.mkdir(parents=True, exist_ok=True)
    model = models.prepare(args.folder, args.model, args.quantize)
    common = ["--model", str(model), "--ctx-size", str(context * max(streams)), "--parallel", str(max(streams)), "--cache-ram", "0"]
    compared = [mode for mode in MODES if mode != BASELINE]
    lines = ["| Prompt + answer | Streams | " + " | ".join(f"`{mode}` | `{mode}`, captured" for mode in compared) + " | `off` (tokens/s) |"]
    lines.append("|---" * (3 + 2 * len(compared)) + "|")
    results = {}
    with contextlib.ExitStack() as stack:
        servers = {}
        for mode, flags in MODES.items():
            servers[mode] = client.Server(program, [*common, *flags, *args.flags.split()], "thunder")
            stack.callback(servers[mode].close)
            servers[mode].start()
        for prompt_tokens, count in cells:
            for number in streams:
                seen = measure_cell(servers, prompt_tokens, count, number, args.rounds)
                results[f"{prompt_tokens}+{count} {number}"] = seen
                ratios = [f"{ratio(seen, f'{mode} {attention}'):.2f}" for mode in compared for attention in (False, True)]
                rate = statistics.median(seen[f"{BASELINE} False"])
                lines.append(f"| {prompt_tokens}+{count} | {number} | {' | '.join(ratios)} | {rate:.0f} |")
                print(lines[-1], file=sys.stderr, flush=True)
    if args.results:
        args.results.write_text(json.dumps(results, indent=1))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
