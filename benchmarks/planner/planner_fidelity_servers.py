"""For planner_fidelity.py: a server with one engine, the traffic of its clients, and the depths of its drafts."""

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.bench.prompts import load_prompts
from paceline.models.tokenizer.chat_template import ChatTemplate
from paceline.models.tokenizer.load import load_tokenizer
from paceline.runtime.deploy.deployment import free_address

SILENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Arrival:
    """A request of the trace. Times are seconds since the start of the replay."""

    time: float
    prompt: tuple[int, ...]
    output_tokens: int
    seed: int = 0
    temperature: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What became of a request."""

    arrival: Arrival
    first: float
    """Time of the first token, seconds since the start of the replay."""
    last: float
    tokens: tuple[int, ...]
    error: str = ""
    rounds: tuple[int, ...] = ()
    """Rounds with drafts, by the number of accepted ones."""

    @property
    def ttft(self) -> float:
        return self.first - self.arrival.time

    @property
    def tpot(self) -> float:
        """Mean time per token after the first."""
        return (self.last - self.first) / max(1, len(self.tokens) - 1)


def _ask(url: str, arrival: Arrival, started: float) -> Answer:
    first, tokens, rounds = 0.0, [], ()
    try:
        for event in _events(url, arrival):
            new = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
            if new:
                now = time.monotonic() - started
                first = first or now
                tokens += new
            if metrics := event.get("metrics"):
                rounds = tuple(metrics["speculative_decoding"]["acceptance_histogram"])
        error = "" if len(tokens) == arrival.output_tokens else f"{len(tokens)} tokens"
    except (OSError, ValueError, http.client.HTTPException) as problem:
        error = f"{type(problem).__name__}: {problem!s:.200}"
    return Answer(arrival, first, time.monotonic() - started if not tokens else now, tuple(tokens), error, rounds)


def _events(url: str, arrival: Arrival) -> Iterator[dict[str, Any]]:
    """The events of the stream."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=SILENCE_SECONDS)
    body = {
        "prompt": list(arrival.prompt),
        "max_tokens": arrival.output_tokens,
        "temperature": arrival.temperature,
        "top_p": 1.0,  # otherwise as the model recommends
        "top_k": 0,
        "seed": arrival.seed,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read(300)!r}")
        while line := response.readline():
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                return
            value = json.loads(data)
            if "error" in value:
                raise ValueError(f"the stream ended with {value['error']}")
            yield value
        raise OSError("the stream ended without [DONE]")
    finally:
        connection.close()


MAX_CHARACTERS = 4000
FIT_EVERY = 5
"""Every fifth text belongs to the traffic of the fit, the others to the traffic that is compared."""


def text_requests(model: str, path: Path, tokens: int) -> tuple[list[Arrival], list[Arrival]]:
    """Requests with the first turns of the file as chats: those to compare, and those of the fit."""
    tokenizer = load_tokenizer(model)
    template = ChatTemplate.of(tokenizer)
    kept: tuple[list[Arrival], list[Arrival]] = [], []
    for number, prompt in enumerate(load_prompts(path)):
        text = template.render([{"role": "user", "content": prompt.turns[0][:MAX_CHARACTERS]}])
        ids = tokenizer.encode(text, add_special=False)
        kept[number % FIT_EVERY == 0].append(Arrival(0.0, tuple(ids), tokens))
    return kept


def cycled(requests: Sequence[Arrival], count: int) -> list[Arrival]:
    return [requests[i % len(requests)] for i in range(count)]


def closed_loop(url: str, requests: Sequence[Arrival], streams: int) -> list[Answer]:
    """The answers in the order of the requests. Every stream sends the next request when its last one has ended."""
    numbers, lock, started = iter(range(len(requests))), threading.Lock(), time.monotonic()
    answers: dict[int, Answer] = {}

    def stream() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            arrival = replace(requests[number], time=time.monotonic() - started)
            answers[number] = _ask(url, arrival, started)

    with ThreadPoolExecutor(streams) as pool:
        for future in [pool.submit(stream) for _ in range(streams)]:
            future.result()
    return [answers[number] for number in range(len(requests))]


PACELINE = (sys.executable, "-m", "paceline")
KEY = "planner-benchmark"
START_SECONDS = 180.0


@contextmanager
def server(model: str, draft: str, options: Sequence[str]) -> Iterator[str]:
    """The address of `paceline serve` with one engine."""
    with _serving("--model", model, "--draft", draft, "--log-level", "warning", *options) as url:
        yield url


@contextmanager
def _serving(*arguments: str) -> Iterator[str]:
    port = free_address().rpartition(":")[2]
    command, environment = [*PACELINE, "serve", *arguments, "--port", port], {**os.environ, "PACELINE_ADMIN_KEY": KEY}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        try:
            _until_ready(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"the server is not ready after {START_SECONDS:.0f} s, or has ended")


@dataclass(frozen=True)
class DraftDepths:
    """Rounds by depth, since the start of a server."""

    rounds: Counter[int]

    @classmethod
    def read(cls, url: str) -> "DraftDepths":
        rounds, below = Counter[int](), Counter[str]()
        for line in _get(f"{url}/metrics").splitlines():
            bucket = re.match(r'paceline_draft_depth_bucket\{(.*)le="([\d.]+)"(.*)\} (\S+)', line)
            if bucket is not None:
                labels, count = bucket[1] + bucket[3], int(float(bucket[4]))
                rounds[int(float(bucket[2]))] += count - below[labels]
                below[labels] = count
        return cls(rounds)

    def since(self, before: "DraftDepths") -> "DraftDepths":
        return DraftDepths(self.rounds - before.rounds)

    @property
    def mean(self) -> float:
        return sum(depth * count for depth, count in self.rounds.items()) / max(1, self.rounds.total())

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the rounds that drafted each position."""
        deepest, total = max(self.rounds, default=0), self.rounds.total()
        return tuple(
            sum(count for depth, count in self.rounds.items() if depth >= position) / total
            for position in range(1, deepest + 1)
        )


def _get(url: str) -> str:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())
