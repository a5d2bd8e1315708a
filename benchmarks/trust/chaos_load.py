"""The load of `chaos.py`: streams over HTTP that are compared with plain decoding, and poison requests."""

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PATH = "/v1/completions"
SILENCE_SECONDS = 90.0
"""Time without an event after which a stream counts as lost."""
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village,",
    "List three colours: red,",
    "Q: What is 12 times 12?\nA:",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
)


@dataclass(frozen=True)
class Case:
    """A request whose text is fixed by its prompt, temperature and seed."""

    prompt: str
    temperature: float
    seed: int
    max_tokens: int

    def body(self, **options: Any) -> dict[str, Any]:
        values = {"prompt": self.prompt, "temperature": self.temperature, "seed": self.seed}
        return {**values, "max_tokens": self.max_tokens, "ignore_eos": True, **options}


@dataclass
class Results:
    """Counts over all streams. Every write holds `lock`."""

    finished: int = 0
    tokens: int = 0
    refused: int = 0
    """Requests that got 429 or 503 before their first token, and were sent again."""
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of the longest pause of each stream."""
    poison: Counter[int] = field(default_factory=Counter)
    """Statuses of poison requests. 0 counts those without a response."""
    lock: threading.Lock = field(default_factory=threading.Lock)


def cases(seed: int, count: int, max_tokens: int) -> list[Case]:
    """Half greedy, half sampled; prompts repeat, so that prefixes are shared."""
    rng = random.Random(seed)
    return [Case(rng.choice(PROMPTS) + " x" * rng.randrange(40), float(i % 2), i, max_tokens) for i in range(count)]


def post(url: str, body: Any, seconds: float = SILENCE_SECONDS) -> tuple[http.client.HTTPConnection, Any]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", PATH, data, {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def plain_text(url: str, case: Case) -> str:
    connection, response = post(url, case.body(speculation={"enabled": False}))
    answer = json.loads(response.read())
    connection.close()
    text: str = answer["choices"][0]["text"]
    return text


class Streams:
    """Threads that each run one stream after the other until `stop` is set."""

    def __init__(self, url: str, expected: dict[Case, str], results: Results, count: int, seed: int) -> None:
        self.stop = threading.Event()
        self._url, self._expected, self._results = url, expected, results
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}-{i}"),), daemon=True) for i in range(count)
        ]

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

    def _run(self, rng: random.Random) -> None:
        names = sorted(self._expected, key=lambda case: case.seed)
        while not self.stop.is_set():
            case = rng.choice(names)
            try:
                self._stream(case)
            except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
                with self._results.lock:
                    self._results.lost.append(f"{type(error).__name__}: {error!s:.200}")

    def _stream(self, case: Case) -> None:
        connection, response = post(self._url, case.body(stream=True))
        try:
            if response.status in (429, 503):
                with self._results.lock:
                    self._results.refused += 1
                time.sleep(0.5)
                return
            if response.status != 200:
                raise ValueError(f"status {response.status}: {response.read(300)!r}")
            text, gap = _read(response)
        finally:
            connection.close()
        with self._results.lock:
            self._results.finished += 1
            self._results.tokens += case.max_tokens
            self._results.gaps.append(gap)
            if text != self._expected[case]:
                self._results.different.append(
                    f"seed {case.seed}: {text!r:.80} in place of {self._expected[case]!r:.80}"
                )


def _read(response: http.client.HTTPResponse) -> tuple[str, tuple[float, float]]:
    """The text of a stream and its longest pause. Raises `ValueError` if the stream ends with an error or without its end."""
    text, last, gap = "", 0.0, (0.0, 0.0)
    for event in _events(response):
        now = time.monotonic()
        if last and now - last > gap[1] - gap[0]:
            gap = last, now
        last = now
        if event == "[DONE]":
            return text, gap
        value = json.loads(event)
        if "error" in value:
            raise ValueError(f"the stream ended with {value['error']}")
        text += "".join(choice["text"] for choice in value["choices"])
    raise ValueError("the stream ended without [DONE]")


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    while line := response.readline():
        if line.startswith(b"data: "):
            yield line[6:].strip().decode()


def _schema(properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


POISON: dict[str, Callable[[], Any]] = {
    "500 optional fields": lambda: {"prompt": "x", **_schema({f"f{i}": {"type": "string"} for i in range(500)})},
    "nested repetition": lambda: {
        "prompt": "x",
        **_schema({"a": {"type": "string", "pattern": "^((a{100}){100}){100}$"}}),
    },
    "recursive schema": lambda: {"prompt": "x", **_schema({"a": {"$ref": "#"}})},
    "deep JSON": lambda: b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "many ids": lambda: {"prompt": [1] * 1_000_000},
    "long text": lambda: {"prompt": "word " * 1_500_000},
    "one long word": lambda: {"prompt": "a" * 2_000_000},
    "negative ids": lambda: {"prompt": [-1, -(2**63)]},
    "huge ids": lambda: {"prompt": [2**31, 2**63]},
    "not a number": lambda: b'{"prompt": "x", "temperature": NaN}',
    "infinite penalty": lambda: b'{"prompt": "x", "frequency_penalty": 1e999}',
    "biases": lambda: {"prompt": "x", "logit_bias": {str(i): 100 for i in range(20_000)}},
    "stops": lambda: {"prompt": "x", "stop": ["a" * 100_000] * 4},
    "choices": lambda: {"prompt": "x", "n": 10**6},
    "prompts": lambda: {"prompt": ["x"] * 20_000},
    "half a character": lambda: b'{"prompt": "\\ud800"}',
    "zero bytes": lambda: {"prompt": "\0" * 1000, "max_tokens": 4},
    "not JSON": lambda: b"\xff" * 1000,
    "empty body": lambda: b"",
    "no tokens": lambda: {"prompt": [], "max_tokens": 4},
}


def send_poison(url: str, name: str, results: Results) -> None:
    """Sends one poison request and counts its status."""
    status = 0
    try:
        connection, response = post(url, POISON[name](), seconds=30.0)
        response.read()
        connection.close()
        status = response.status
    except (OSError, http.client.HTTPException):
        pass
    with results.lock:
        results.poison[status] += 1
