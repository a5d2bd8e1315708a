"""Load several running servers in turn, and print one table: throughput, TTFT and time per output token (TPOT).

    python benchmarks/vllm/serve_compare.py --server vllm=8200 --server plain=8123,off --server goodput=8123 --model NAME \\
        --prompts PROMPTS.jsonl --closed 1:6,8:48,64:320 --repeats 3
    python benchmarks/vllm/serve_compare.py --server vllm=8200 --server goodput=8123 --model NAME --prompts PROMPTS.jsonl \\
        --open 40:400,70:700 --arrivals azure_llm_trace_code.csv

A load is STREAMS:REQUESTS of a closed loop, or RATE:REQUESTS of an open loop (serve_load.py). The servers take turns; the
order is reversed in every other repeat, and the first run of each load and server is not counted. A cell is the median over
the repeats, with the lowest and highest throughput. `off` after a port asks Paceline not to speculate. After `--seconds` no
further load is started.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from serve_load import Load, run


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs, and how it is asked."""

    name: str
    port: int
    off: bool

    @classmethod
    def read(cls, text: str) -> "Server":
        name, _, rest = text.partition("=")
        port, _, flag = rest.partition(",")
        if not port.isdigit() or flag not in ("", "off"):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PORT or NAME=PORT,off")
        return cls(name, int(port), flag == "off")


def pairs(text: str) -> list[tuple[int, int]]:
    """'1:6,8:48' -> [(1, 6), (8, 48)]."""
    return [(int(first), int(second)) for first, _, second in (part.partition(":") for part in text.split(",") if part)]


def middle(loads: Sequence[Load], value: Callable[[Load], float]) -> float:
    return median(value(load) for load in loads)


def cells(loads: Sequence[Load], is_open: bool) -> str:
    rates = [load.throughput for load in loads]
    ttft = f"{middle(loads, lambda load: load.ttft[0]):.0f} / {middle(loads, lambda load: load.ttft[1]):.0f}"
    tpot = f"{middle(loads, lambda load: load.tpot[0]):.2f} / {middle(loads, lambda load: load.tpot[1]):.2f}"
    row = f"{median(rates):.0f} | {min(rates):.0f} to {max(rates):.0f} | {ttft} | {tpot}"
    return f"{row} | {middle(loads, lambda load: load.good_rate):.1f}" if is_open else row


def measure(options: argparse.Namespace, numbers: tuple[int, int], is_open: bool) -> dict[str, list[Load]]:
    first, requests = numbers
    found: dict[str, list[Load]] = {server.name: [] for server in options.servers}
    for turn in range(options.repeats + (not is_open)):
        for server in options.servers[:: -1 if turn % 2 else 1]:
            options.port, options.off = server.port, server.off
            options.streams, options.rate, options.requests = first, float(first) if is_open else None, requests
            load = asyncio.run(run(options))
            print(f"    {server.name}: {load}", flush=True)
            if turn or is_open:
                found[server.name].append(load)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--server", dest="servers", type=Server.read, action="append", required=True, metavar="NAME=PORT"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a list `turns`")
    parser.add_argument("--closed", type=pairs, default=[], metavar="STREAMS:REQUESTS,…")
    parser.add_argument("--open", type=pairs, default=[], metavar="RATE:REQUESTS,…")
    parser.add_argument("--arrivals", type=Path, help="trace of the open loop")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--max-ttft", type=float, default=500.0, help="objective, in ms")
    parser.add_argument("--max-tpot", type=float, default=25.0, help="objective, in ms")
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    if options.open and not options.arrivals:
        parser.error("--open needs --arrivals")
    began = time.monotonic()
    rows: dict[bool, list[str]] = {False: [], True: []}
    for is_open, numbers in [(False, load) for load in options.closed] + [(True, load) for load in options.open]:
        if time.monotonic() - began > options.seconds:
            print(f"{numbers[0]} is left out: {options.seconds:g} s have passed", flush=True)
            continue
        print(f"{numbers[0]} {'requests/s' if is_open else 'streams'}", flush=True)
        found = measure(options, numbers, is_open)
        base = median(load.throughput for load in found[options.servers[0].name])
        for server in options.servers:
            loads = found[server.name]
            ratio = median(load.throughput for load in loads) / base
            rows[is_open].append(f"| {numbers[0]} | {server.name} | {cells(loads, is_open)} | {ratio:.2f} |")
    for is_open, lines in rows.items():
        if lines:
            load, good = ("requests/s", "within the objective, requests/s | ") if is_open else ("streams", "")
            figures = (
                f"tok/s | lowest to highest | TTFT p50 / p99 ms | TPOT p50 / p99 ms | {good}/ {options.servers[0].name}"
            )
            print(f"\n| {load} | server | {figures} |")
            print("|---" * (8 if is_open else 7) + "|")
            print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
