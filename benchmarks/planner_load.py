"""Open-loop traffic for a gateway: requests arrive at their times, whether or not earlier ones have ended."""

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SILENCE_SECONDS = 60.0
MAX_CONNECTIONS = 128


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


def random_prompts(count: int, lengths: Sequence[int], vocabulary: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of random tokens, which share no prefix."""
    dice = random.Random(seed)
    return [tuple(dice.randrange(100, vocabulary) for _ in range(dice.choice(lengths))) for _ in range(count)]


def replay(url: str, arrivals: Sequence[Arrival]) -> list[Answer]:
    """The answers to all arrivals, in their order. Blocks until the last one has ended."""
    started = time.monotonic()
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        futures = []
        for arrival in arrivals:
            time.sleep(max(0.0, started + arrival.time - time.monotonic()))
            futures.append(pool.submit(_ask, url, arrival, started))
        return [future.result() for future in futures]


class Replay(threading.Thread):
    """A replay in a thread of its own; `answers` holds all answers after `join`."""

    def __init__(self, url: str, arrivals: Sequence[Arrival]) -> None:
        super().__init__(daemon=True)
        self._url, self._arrivals = url, arrivals
        self.answers: list[Answer] = []

    def run(self) -> None:
        self.answers = replay(self._url, self._arrivals)


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
