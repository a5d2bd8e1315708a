"""Clients of `live.py`: resumable streams over several gateways, compared with plain decoding in one process."""

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from paceline.core.config import EngineConfig
from paceline.core.request import Request, SamplingParams, SpeculationParams
from paceline.engine.start.build import build_engine

SILENCE_SECONDS = 60.0
RETRY_SECONDS = 0.2
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village,",
    "List three colours: red,",
)


@dataclass(frozen=True)
class Case:
    """A request whose tokens are fixed by its prompt, temperature and seed."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt": list(self.prompt),
            "temperature": self.temperature,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"resumable": True},
        }


@dataclass
class Results:
    """Counts over all streams. Every write holds `lock`."""

    finished: int = 0
    resumed: int = 0
    """Connections that broke and were continued with `Last-Event-ID`."""
    lost: list[str] = field(default_factory=list)
    different: list[int] = field(default_factory=list)
    """Seeds of streams with other tokens than plain decoding."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of tokens of each event."""
    lock: threading.Lock = field(default_factory=threading.Lock)


def plain_tokens(model: str, count: int, max_tokens: int, seed: int) -> dict[Case, list[int]]:
    """Cases, half of them sampled, and their tokens by plain decoding in this process."""
    rng = random.Random(seed)
    limits = {"max_num_seqs": 16, "max_model_len": 512, "kv_tokens": 8192}
    engine = build_engine(EngineConfig(model=model, device="cpu", **limits))
    assert engine.tokenizer is not None
    cases = []
    for i in range(count):
        text = rng.choice(PROMPTS) + " x" * rng.randrange(20)
        cases.append(Case(tuple(engine.tokenizer.encode(text)), float(i % 2), i, max_tokens))
    tokens: dict[str, list[int]] = {str(case.seed): [] for case in cases}
    for case in cases:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=case.temperature, seed=case.seed, ignore_eos=True)
        request = Request(str(case.seed), case.prompt, sampling, SpeculationParams(enabled=False))
        engine.add(engine.validate(request))
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
    return {case: tokens[str(case.seed)] for case in cases}


class Streams:
    """Threads that each run one stream after the other until `stop` is set."""

    def __init__(self, urls: list[str], expected: dict[Case, list[int]], results: Results, count: int) -> None:
        self.stop = threading.Event()
        self._urls, self._expected, self._results = urls, expected, results
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(count)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, seconds: float) -> int:
        """Lets every stream finish; returns how many did not."""
        self.stop.set()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self, number: int) -> None:
        rng, cases = random.Random(number), list(self._expected)
        while not self.stop.is_set():
            case = rng.choice(cases)
            try:
                tokens = self._stream(case, rng)
            except (ValueError, LookupError) as error:
                with self._results.lock:
                    self._results.lost.append(f"{type(error).__name__}: {error!s:.300}")
                continue
            with self._results.lock:
                self._results.finished += 1
                if tokens != self._expected[case]:
                    self._results.different.append(case.seed)

    def _stream(self, case: Case, rng: random.Random) -> list[int]:
        """The tokens of one stream, over as many connections as it takes."""
        tokens: list[int] = []
        last: str | None = None
        deadline = time.monotonic() + 2 * SILENCE_SECONDS
        while time.monotonic() < deadline:
            url = rng.choice(self._urls)
            try:
                for event_id, value in _events(url, case.body(), last):
                    if value is None:
                        return tokens
                    new = [token for choice in value["choices"] for token in choice["token_ids"]]
                    tokens += new
                    last = event_id
                    with self._results.lock:
                        self._results.arrivals.append((time.monotonic(), len(new)))
            except (OSError, http.client.HTTPException):
                pass
            if last is None:
                tokens.clear()
            else:
                with self._results.lock:
                    self._results.resumed += 1
            time.sleep(RETRY_SECONDS)
        raise ValueError(f"no gateway served the stream; it had {len(tokens)} tokens")


def _events(url: str, body: Any, last: str | None) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Id and data of each event; data is None for `[DONE]`. Raises `OSError` if the gateway is gone or has no room."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=SILENCE_SECONDS)
    headers = {"Content-Type": "application/json"} | ({} if last is None else {"Last-Event-ID": last})
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status in (429, 503):
            raise OSError("no room")
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read(500)!r}")
        data = ""
        while line := response.readline():
            if line.startswith(b"data: "):
                data = line[6:].strip().decode()
                if data == "[DONE]":
                    yield "", None
                    return
                if "error" in (value := json.loads(data)):
                    raise ValueError(f"the stream ended with {value['error']}")
            elif line.startswith(b"id: "):
                yield line[4:].strip().decode(), json.loads(data)
        raise OSError("the stream ended without [DONE]")
    finally:
        connection.close()
