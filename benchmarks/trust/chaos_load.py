"""The load of `chaos.py` and `soak.py`: resumable streams that are compared with plain decoding, and poison requests."""

import http.client
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from tests.poison.attack import post as send
from tests.poison.kinds import KINDS

PATH = "/v1/completions"
SILENCE_SECONDS = 1800.0
"""Time without an event after which a stream counts as lost. A busy machine starts a worker in a fraction of it."""
RETRY_SECONDS, SHOWN_GAP = 1.0, 0.5
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village,",
    "List three colours: red,",
    "Q: What is 12 times 12?\nA:",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
)
NOT_FOUND = "stream_not_found"


@dataclass(frozen=True)
class Case:
    """A request whose text is fixed by its prompt, temperature and seed."""

    prompt: str
    temperature: float
    seed: int
    max_tokens: int

    def body(self, **options: Any) -> dict[str, Any]:
        values = {"prompt": self.prompt, "temperature": self.temperature, "seed": self.seed, "return_token_ids": True}
        return {**values, "max_tokens": self.max_tokens, "ignore_eos": True, **options}


@dataclass
class Span:
    """The time of one stream, over all its connections, by `time.monotonic`."""

    start: float
    end: float = 0.0
    outcome: Literal["finished", "lost", "different"] = "finished"
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Times without an event of more than half a second, after the first one."""


@dataclass
class Results:
    """Counts over all streams. Every write holds `lock`."""

    spans: list[Span] = field(default_factory=list)
    """Streams that ended."""
    tokens: int = 0
    refused: int = 0
    """Requests that got 429 or 503, and were sent again."""
    resumed: int = 0
    """Connections that broke and were continued with `Last-Event-ID`."""
    resent: int = 0
    """Streams that no worker had any more (404): the client sent the request again, from the beginning."""
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    poison: Counter[int] = field(default_factory=Counter)
    """Statuses of poison requests. 0 counts those without a response."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def longest_gap(self, start: float = 0.0, end: float = math.inf) -> float:
        """The longest gap of a stream that has a part between these times."""
        gaps = (gap for span in self.spans for gap in span.gaps if gap[0] < end and gap[1] > start)
        return max((until - since for since, until in gaps), default=0.0)


def cases(seed: int, count: int, max_tokens: int) -> list[Case]:
    """Half greedy, half sampled; prompts repeat, so that prefixes are shared, and some are long enough for a prefill worker."""
    rng = random.Random(seed)
    return [
        Case(rng.choice(PROMPTS) + " x" * rng.choice((0, 7, 90, 120)), float(i % 2), i, max_tokens)
        for i in range(count)
    ]


def post(
    url: str, body: Any, seconds: float = SILENCE_SECONDS, last: str | None = None
) -> tuple[http.client.HTTPConnection, Any]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({} if last is None else {"Last-Event-ID": last})
    try:
        connection.request("POST", PATH, data, headers)
        return connection, connection.getresponse()
    except BaseException:
        connection.close()
        raise


@dataclass
class Output:
    """What a client has of a stream."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    last: str | None = None
    """Id of the last event."""

    def add(self, event_id: str, value: dict[str, Any]) -> None:
        for choice in value["choices"]:
            self.text += choice["text"]
            self.tokens += choice["token_ids"]
        self.last = event_id


def plain(url: str, case: Case) -> Output:
    connection, response = post(url, case.body(speculation={"enabled": False}))
    answer = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise ValueError(f"status {response.status}: {answer}")
    choice = answer["choices"][0]
    return Output(choice["text"], choice["token_ids"])


class Lost(Exception):
    """A stream that ended with an error, or had no event for too long."""


class Streams:
    """Threads that each run one stream after the other until `join`."""

    def __init__(
        self, url: str, expected: dict[Case, Output], results: Results, count: int, seed: str, pause: float = 0.0
    ) -> None:
        """A thread waits `pause` seconds in the mean between two streams."""
        self._stop = threading.Event()
        self._url, self._expected, self._results, self._pause = url, expected, results, pause
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}-{i}"),), daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, seconds: float) -> None:
        """Lets every stream finish; one that does not is lost."""
        self._stop.set()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        unfinished = sum(thread.is_alive() for thread in self._threads)
        with self._results.lock:
            self._results.lost += ["a stream did not end"] * unfinished

    def _run(self, rng: random.Random) -> None:
        results, names = self._results, sorted(self._expected, key=lambda case: case.seed)
        while not self._stop.is_set():
            case, span = rng.choice(names), Span(time.monotonic())
            try:
                output = self._stream(case, span)
            except (Lost, ValueError, LookupError) as error:
                self._end(span, "lost", f"seed {case.seed}: {type(error).__name__}: {error!s:.300}")
                continue
            expected = self._expected[case]
            if (output.text, output.tokens) == (expected.text, expected.tokens):
                self._end(span, "finished")
            else:
                text = f"seed {case.seed}: {output.text!r:.200} in place of {expected.text!r:.200}"
                self._end(span, "different", text)
            with results.lock:
                results.tokens += len(output.tokens)
            self._stop.wait(rng.uniform(0.0, 2 * self._pause))

    def _end(self, span: Span, outcome: Literal["finished", "lost", "different"], text: str = "") -> None:
        span.end, span.outcome = time.monotonic(), outcome
        with self._results.lock:
            self._results.spans.append(span)
            if outcome != "finished":
                (self._results.lost if outcome == "lost" else self._results.different).append(text)

    def _stream(self, case: Case, span: Span) -> Output:
        """One stream, over as many connections as it takes."""
        output, heard, has_started = Output(), span.start, False
        while time.monotonic() - heard < SILENCE_SECONDS:
            is_resumed = output.last is not None
            try:
                for event_id, value in _events(self._url, case.body(stream=True), output.last):
                    now = time.monotonic()
                    if is_resumed:
                        self._count("resumed")
                        is_resumed = False
                    if has_started and now - heard > SHOWN_GAP:
                        span.gaps.append((heard, now))
                    heard, has_started = now, True
                    if value is None:
                        return output
                    output.add(event_id, value)
            except _Refused as refused:
                self._count("refused" if not refused.is_unknown else "resent")
                if refused.is_unknown:
                    if output.tokens != self._expected[case].tokens[: len(output.tokens)]:
                        raise ValueError(f"{output.text!r:.200} is not the beginning of the text") from None
                    output = Output()
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(RETRY_SECONDS)
        raise Lost(f"no event for {SILENCE_SECONDS:.0f} s, after {len(output.tokens)} tokens")

    def _count(self, name: str) -> None:
        with self._results.lock:
            setattr(self._results, name, getattr(self._results, name) + 1)


class _Refused(Exception):
    def __init__(self, is_unknown: bool) -> None:
        self.is_unknown = is_unknown
        """Whether no worker has the stream. If not, the server has no room now."""


def _events(url: str, body: Any, last: str | None) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Id and data of each whole event; data is None for `[DONE]`. Raises `OSError` if the connection breaks."""
    connection, response = post(url, {**body, "stream_options": {"resumable": True}}, last=last)
    try:
        if response.status in (429, 503):
            raise _Refused(is_unknown=False)
        if response.status != 200:
            text = response.read(500).decode()
            if last is not None and response.status == 404 and NOT_FOUND in text:
                raise _Refused(is_unknown=True)
            raise Lost(f"status {response.status}: {text}")
        data = event_id = ""
        while line := response.readline().decode():
            if line.startswith("data: "):
                data = line[6:].strip()
            elif line.startswith("id: "):
                event_id = line[4:].strip()
            elif not line.strip() and data == "[DONE]":
                yield "", None
                return
            elif not line.strip() and data:
                if "error" in (value := json.loads(data)):
                    raise Lost(f"the stream ended with {value['error']}")
                yield event_id, value
                data = ""
        raise OSError("the stream ended without [DONE]")
    finally:
        connection.close()


def send_poison(url: str, rng: random.Random, results: Results) -> str:
    """Sends one poison request and counts its status. Returns its kind."""
    kind, status = rng.choice(sorted(KINDS)), 0
    poison = KINDS[kind](rng)
    with suppress(OSError, http.client.HTTPException):
        status, _ = send(url, poison.path, poison.body, timeout=30.0)
    with results.lock:
        results.poison[status] += 1
    return kind
