"""Streams of one server with and without poisonous requests beside them: `python -m tests.poison.attack`.

Prints what each kind of poison received, and a summary: streams lost, streams with other text, the longest gap between two
chunks of a stream and the poison under way then, the slowest answers of `/health`, and the process ids of the workers before
and after. `--cluster` attacks two targets and a draft worker in place of one engine.
"""

import argparse
import http.client
import json
import math
import multiprocessing
import random
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from tests.gateway.process import Process, cluster_process, server_process
from tests.poison.kinds import BODIES, KINDS

HEALTH_SECONDS = 0.02
"""Pause between two calls of `/health`."""
SPAWN = multiprocessing.get_context("spawn")


LIMITS = {"max_num_seqs": 32, "kv_tokens": 16384, "max_model_len": 1024}
CLUSTER = {
    "name": "poison",
    "pools": [
        {"name": "target", "role": "target", "model": "smollm2", "replicas": 2, "devices": ["cpu"], "limits": LIMITS},
        {"name": "draft", "role": "draft", "model": "smollm2-distilled", "devices": ["cpu"], "limits": LIMITS},
    ],
}


class Span(NamedTuple):
    """A time between two readings of `time.monotonic`."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class StreamResult:
    """One request, sent again and again as long as the attack lasts."""

    texts: list[str] = field(default_factory=list)
    num_lost: int = 0
    gap: Span = field(default_factory=lambda: Span(0.0, 0.0))
    """The longest gap between two chunks."""


@dataclass
class Run:
    """What the streams and `/health` saw."""

    streams: list[StreamResult]
    health: list[float]
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    poisons: list[tuple[str, Span]] = field(default_factory=list)
    """Every request of the attack and the time from its sending to its answer."""

    @property
    def gap(self) -> Span:
        """The longest gap of all streams."""
        return max((stream.gap for stream in self.streams), key=lambda gap: gap.seconds)

    @property
    def longest_gap(self) -> float:
        return self.gap.seconds

    @property
    def poisons_in_gap(self) -> list[str]:
        """Kinds that were under way during the longest gap."""
        return [name for name, span in self.poisons if span.start < self.gap.end and span.end > self.gap.start]

    @property
    def num_lost(self) -> int:
        return sum(stream.num_lost for stream in self.streams)

    @property
    def num_streams(self) -> int:
        return sum(len(stream.texts) for stream in self.streams)

    def num_different(self, plain: "Run") -> int:
        """Streams with another text than in `plain`."""
        pairs = zip(self.streams, plain.streams, strict=True)
        return sum(text != other.texts[0] for one, other in pairs for text in one.texts)

    @property
    def health_p99(self) -> float:
        ordered = sorted(self.health)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def post(url: str, path: str, body: bytes, timeout: float = 120.0) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # the server refuses before it has read all
            connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def read_streams(url: str, number: int, tokens: int, result: StreamResult, is_attacked: threading.Event) -> None:
    """A seeded stream, and again until the attack is over."""
    while not result.texts or is_attacked.is_set():
        read_stream(url, number, tokens, result)


def read_stream(url: str, number: int, tokens: int, result: StreamResult) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    body = {
        "prompt": f"Story number {number}: once upon a time",
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response, last, text = connection.getresponse(), None, ""
        for line in response:
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic()
            if last is not None and now - last > result.gap.seconds:
                result.gap = Span(last, now)
            last = now
            if line.strip() == b"data: [DONE]":
                result.texts.append(text)
                return
            chunk = json.loads(line[6:])
            text += "".join(choice["text"] for choice in chunk.get("choices", ()))
    except (OSError, http.client.HTTPException, ValueError):
        pass
    finally:
        connection.close()
    result.num_lost += 1
    result.texts.append("")


@contextmanager
def health_watch(url: str, seconds: list[float]) -> Iterator[None]:
    """Calls `/health` inside the block and adds the time of each call, from a process that no other client slows."""
    answers, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_watch_health, args=(url, theirs), daemon=True)
    process.start()
    answers.recv()  # it has started
    yield
    answers.send(None)
    seconds.extend(answers.recv())
    process.join()


def _watch_health(url: str, connection: Connection) -> None:
    parts, seconds = urlsplit(url), list[float]()
    connection.send(None)
    while not connection.poll(HEALTH_SECONDS):
        began = time.monotonic()
        client = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        try:
            client.request("GET", "/health")
            is_healthy = client.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            is_healthy = False
        finally:
            client.close()
        seconds.append(time.monotonic() - began if is_healthy else math.inf)
    connection.send(seconds)


def run_streams(url: str, count: int, tokens: int, kinds: Sequence[str] = (), seed: int = 0, rounds: int = 1) -> Run:
    """Run the streams to their end, and beside them the poison of these kinds, each `rounds` times, by two clients."""
    rng = random.Random(seed)
    poisons = [
        (name, KINDS[name](rng)) for _ in range(rounds) for name in kinds
    ]  # now: it would delay this client's readers
    run, is_attacked = Run([StreamResult() for _ in range(count)], []), threading.Event()
    is_attacked.set()
    readers = [
        threading.Thread(target=read_streams, args=(url, number, tokens, result, is_attacked))
        for number, result in enumerate(run.streams)
    ]
    lock = threading.Lock()

    def attack() -> None:
        while True:
            with lock:
                if not poisons:
                    return
                name, poison = poisons.pop(0)
            began = time.monotonic()
            try:
                status, _ = post(url, poison.path, poison.body)
            except (OSError, http.client.HTTPException):
                status = 0
            with lock:
                run.statuses[name][status] += 1
                run.poisons.append((name, Span(began, time.monotonic())))

    attackers = [threading.Thread(target=attack) for _ in range(2)]
    with health_watch(url, run.health):
        for thread in (*readers, *attackers):
            thread.start()
        for thread in attackers:
            thread.join()
        is_attacked.clear()
        for thread in readers:
            thread.join()
    return run


def engine_pids(pid: int) -> set[int]:
    """Process ids of the workers that the server has started."""
    children = psutil.Process(pid).children(recursive=True)
    return {child.pid for child in children if "paceline.worker.main" in " ".join(child.cmdline())}


def report(plain: Run, attacked: Run) -> list[str]:
    """The figures of both runs as lines of a table."""
    return [
        "| | without | with poison |",
        "|---|---|---|",
        f"| streams, lost, different | {plain.num_streams}, {plain.num_lost}, {plain.num_different(plain)} "
        f"| {attacked.num_streams}, {attacked.num_lost}, {attacked.num_different(plain)} |",
        f"| longest gap of a stream | {plain.longest_gap:.2f} s | {attacked.longest_gap:.2f} s |",
        f"| poison under way then | | {', '.join(attacked.poisons_in_gap)} |",
        f"| `/health`: p99, slowest | {plain.health_p99 * 1e3:.0f}, {max(plain.health) * 1e3:.0f} ms "
        f"| {attacked.health_p99 * 1e3:.0f}, {max(attacked.health) * 1e3:.0f} ms |",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server; default: one is started with the embedded model")
    parser.add_argument("--cluster", action="store_true", help="start two targets and a draft worker")
    parser.add_argument("--bodies", action="store_true", help="send the kinds with large bodies alone")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.url is not None:
        return attack_server(options.url, options, None)
    with cluster_server() if options.cluster else engine_server() as process:
        return attack_server(process.url, options, process.popen.pid)


def engine_server() -> AbstractContextManager[Process]:
    return server_process(**LIMITS, max_waiting=64)


@contextmanager
def cluster_server() -> Iterator[Process]:
    """The gateway of two targets and a draft worker."""
    with tempfile.TemporaryDirectory(prefix="poison-") as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(json.dumps({**CLUSTER, "state_dir": str(Path(folder) / "state")}))  # JSON is YAML
        with cluster_process(file, max_waiting=64) as process:
            yield process


def attack_server(url: str, options: argparse.Namespace, pid: int | None) -> int:
    run_streams(url, options.streams, 16)  # warm
    before = engine_pids(pid) if pid is not None else set()
    plain = run_streams(url, options.streams, options.tokens)
    kinds = BODIES if options.bodies else list(KINDS)
    attacked = run_streams(url, options.streams, options.tokens, kinds, options.seed, options.rounds)
    for name, statuses in attacked.statuses.items():
        print(f"{name:32} {dict(statuses)}")
    print("\n".join(report(plain, attacked)))
    after = engine_pids(pid) if pid is not None else set()
    print(f"engine processes: {sorted(before)} before, {sorted(after)} after")
    return 0 if not attacked.num_lost + attacked.num_different(plain) and before == after else 1


if __name__ == "__main__":
    raise SystemExit(main())
