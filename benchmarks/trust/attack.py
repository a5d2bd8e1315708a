"""All attacks at once on one server, while four other keys read seeded streams.

    make attack                          # 10 minutes
    make attack ARGS="--minutes 1"

First 16 clients of four keys stream without an attack, for a fifth of the time and at least 100 streams. Then the same
clients stream during the attack until its time is over and 200 streams have ended. The attack, by a process with another key:
every attack of `mended.py` again and again, all kinds of poison of `tests/poison/kinds.py` by two clients, and model files that
once took minutes. Exit status 1: a stream was lost or different, or the engine was restarted.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import random
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import psutil
from mended import ADMIN_KEY, ATTACKS, LOCAL, Server, memory, run_local, send_long_prompts, server_with_keys
from tests.poison.attack import engine_pids, health_watch
from tests.poison.kinds import KINDS

CLIENTS, KEYS, STREAMS, CALM_STREAMS = 16, 4, 200, 100
TEXTS = 12
"""Different requests of the streams."""
PAUSE, NICE = 10.0, 10
"""Seconds between two attacks of a kind, and the priority of the process that makes them: other attackers have processors of
their own."""
SPAWN = multiprocessing.get_context("spawn")
TOGETHER: dict[str, Callable[[Server], str]] = {**ATTACKS, "long prompts": send_long_prompts}


@dataclass
class Seen:
    """What the clients saw in one phase. Every write holds `lock`."""

    num_streams: int = 0
    num_lost: int = 0
    num_different: int = 0
    first_token: list[float] = field(default_factory=list)
    """Seconds from a request to its first token."""
    gaps: list[float] = field(default_factory=list)
    """Longest time between two events of each stream."""
    health: list[float] = field(default_factory=list)
    peak: float = 0.0
    """Most MB of the gateway and its helpers."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Neighbour:
    """A client that sends one seeded request after the other with one key."""

    def __init__(self, server: Server, number: int, tokens: int, texts: dict[int, str]) -> None:
        """`texts` has the text of each seed; the first stream of a seed adds it."""
        self._server, self._tokens, self._texts = server, tokens, texts
        self._key, self._rng = server.neighbours[number % KEYS], random.Random(number)

    def run(self, seen: Seen, is_over: Callable[[], bool]) -> None:
        while not is_over():
            seed = self._rng.randrange(TEXTS)
            text, first, gap = self.stream(seed)
            with seen.lock:
                seen.num_streams += 1
                if text is None:
                    seen.num_lost += 1
                    continue
                seen.num_different += text != self._texts[seed]
                seen.first_token.append(first)
                seen.gaps.append(gap)

    def stream(self, seed: int) -> tuple[str | None, float, float]:
        """The text, None if it was lost, the time to the first token, and the longest gap after it."""
        body = {"prompt": f"Story number {seed}: once upon a time", "max_tokens": self._tokens, "temperature": 0.8}
        body |= {"seed": seed, "ignore_eos": True, "stream": True}
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._key}"}
        connection = http.client.HTTPConnection(self._server.host, self._server.port, timeout=600)
        began, last, first, gap, text = time.monotonic(), 0.0, 0.0, 0.0, ""
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            for line in connection.getresponse():
                if not line.startswith(b"data: "):
                    continue
                now = time.monotonic()
                first = first or now - began
                gap, last = max(gap, now - (last or now)), now
                if line.strip() == b"data: [DONE]":
                    return text, first, gap
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
        except (OSError, http.client.HTTPException, ValueError, LookupError):
            pass
        finally:
            connection.close()
        return None, first, gap


def phase(server: Server, clients: list[Neighbour], seconds: float, num_streams: int) -> Seen:
    """All clients stream for so long, and until so many streams have ended."""
    seen, end = Seen(), time.monotonic() + seconds

    def is_over() -> bool:
        return time.monotonic() > end and seen.num_streams >= num_streams

    def measure() -> None:
        while not is_over():
            seen.peak = max(seen.peak, memory(server.pid))
            time.sleep(0.1)

    threads = [threading.Thread(target=client.run, args=(seen, is_over)) for client in clients]
    threads.append(threading.Thread(target=measure))
    with health_watch(f"http://{server.host}:{server.port}", seen.health):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return seen


@contextmanager
def attack(server: Server, counts: Counter[str], outcomes: dict[str, str]) -> Iterator[None]:
    """All attacks inside the block, by another process. Adds how often each was made, and its last outcome."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_attack, args=(server, theirs))
    process.start()
    yield
    ours.send(None)
    made, last = ours.recv()
    counts.update(made)
    outcomes.update(last)
    process.join()


def _attack(server: Server, connection: Connection) -> None:
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    counts, outcomes, is_over = Counter[str](), dict[str, str](), threading.Event()

    def repeat(name: str, make: Callable[[], str], pause: float = PAUSE) -> None:
        while not is_over.is_set():
            with suppress(OSError):  # the server closed a connection
                outcomes[name] = make()
            counts[name] += 1
            is_over.wait(pause)

    def poison(rng: random.Random) -> str:
        kind = rng.choice(sorted(KINDS))
        made = KINDS[kind](rng)
        statuses[server.post(made.path, made.body)] += 1
        return f"statuses {dict(statuses)}"

    def files(rng: random.Random) -> str:
        return run_local(rng.choice(sorted(LOCAL)))

    statuses, rng = Counter[int](), random.Random(0)
    makes = {name: (lambda name=name: TOGETHER[name](server)) for name in TOGETHER}
    makes["model files, templates, YAML, ZeroMQ"] = lambda: files(rng)
    threads = [threading.Thread(target=repeat, args=item) for item in makes.items()]
    threads += [threading.Thread(target=repeat, args=("poison", lambda: poison(rng), 0.5)) for _ in range(2)]
    for thread in threads:
        thread.start()
    connection.recv()
    is_over.set()
    for thread in threads:
        thread.join()
    connection.send((counts, outcomes))


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))] if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of the attack")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    os.environ["PACELINE_ADMIN_KEY"] = ADMIN_KEY
    counts, outcomes, texts = Counter[str](), dict[str, str](), dict[int, str]()
    with server_with_keys(KEYS, max_waiting=256) as server:
        clients = [Neighbour(server, number, options.tokens, texts) for number in range(CLIENTS)]
        for seed in range(TEXTS):
            text, _, _ = clients[0].stream(seed)
            assert text is not None
            texts[seed] = text
        before = engine_pids(server.pid)
        calm = phase(server, clients, 12 * options.minutes, CALM_STREAMS)
        with attack(server, counts, outcomes):
            attacked = phase(server, clients, 60 * options.minutes, STREAMS)
        after = engine_pids(server.pid)
    print(f"{options.minutes:g} minutes, load average {psutil.getloadavg()[2]:.0f}\n")
    print("| | without | with the attack | ratio |\n|---|---|---|---|")
    print(
        f"| streams of four keys, lost, different | {calm.num_streams}, {calm.num_lost}, {calm.num_different} "
        f"| {attacked.num_streams}, {attacked.num_lost}, {attacked.num_different} | |"
    )
    for name, values in (
        ("first token, p99", (calm.first_token, attacked.first_token)),
        ("longest gap of a stream, p99", (calm.gaps, attacked.gaps)),
        ("`/health`, p99", (calm.health, attacked.health)),
    ):
        without, during = map(p99, values)
        print(f"| {name}, ms | {without * 1e3:.0f} | {during * 1e3:.0f} | {during / without:.1f} |")
    print(f"| `/health`, slowest, ms | {max(calm.health) * 1e3:.0f} | {max(attacked.health) * 1e3:.0f} | |")
    print(f"| memory of the gateway and its helpers, peak, MB | {calm.peak:.0f} | {attacked.peak:.0f} | |")
    print("\n| attack | times | last outcome |\n|---|---|---|")
    for name, count in counts.items():
        print(f"| {name} | {count} | {outcomes.get(name, '').strip('| ')} |")
    failed = calm.num_lost + attacked.num_lost + calm.num_different + attacked.num_different
    sys.exit(1 if failed or before != after else 0)


if __name__ == "__main__":
    main()
