"""Traces of requests: synthetic ones, and those in files.

`TrafficPattern` is synthetic traffic: a rate, lengths, shared prefixes and bursts. `load_trace` reads CSV of the Azure LLM
inference traces, JSON lines of Mooncake, and request logs of this server.
"""

import csv
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidRequest
from paceline.planning.traces.trace import BLOCK_TOKENS, Trace, TraceRequest, ordered


@dataclass(frozen=True, slots=True)
class TrafficPattern:
    """Requests per second, their lengths in tokens, and how they share prefixes."""

    rate: float
    prompt_tokens: int
    """Mean tokens of a prompt, its shared prefix included."""
    output_tokens: int
    """Mean tokens of an answer."""
    spread: float = 0.5
    """Standard deviation of lengths over their mean; lengths are log-normal."""
    prefix_tokens: int = 0
    """Tokens of the prefix that the requests of one group share."""
    prefix_groups: int = 1
    burst: float = 1.0
    """Standard deviation of the gaps between arrivals over their mean. 1 gives Poisson arrivals, 0 even arrivals."""

    def __post_init__(self) -> None:
        numbers = (self.rate, self.spread, self.burst)
        if not all(map(math.isfinite, numbers)) or self.rate <= 0.0 or min(self.spread, self.burst) < 0.0:
            raise InvalidRequest(
                f"traffic needs a rate above 0, spread and burst of 0 or more, got {numbers}", field="rate"
            )
        if self.output_tokens < 1 or self.prompt_tokens <= self.prefix_tokens or self.prefix_tokens < 0:
            raise InvalidRequest(
                "traffic needs answers of at least 1 token and prompts longer than their prefix", field="rate"
            )
        if self.prefix_groups < 1:
            raise InvalidRequest(f"prefix groups must be at least 1, got {self.prefix_groups}", field="rate")


def synthesize(traffic: TrafficPattern, seconds: float, seed: int = 0) -> Trace:
    """Requests of this traffic that arrive within `seconds`; the same seed gives the same trace."""
    if not math.isfinite(seconds) or seconds <= 0.0:
        raise InvalidRequest(f"a synthetic trace needs a time above 0 seconds, got {seconds}", field="seconds")
    dice, now, requests = random.Random(seed), 0.0, []
    shared = traffic.prefix_tokens // BLOCK_TOKENS
    while now < seconds:
        group = dice.randrange(traffic.prefix_groups)
        requests.append(
            TraceRequest(
                now,
                traffic.prefix_tokens + _length(dice, traffic.prompt_tokens - traffic.prefix_tokens, traffic.spread),
                _length(dice, traffic.output_tokens, traffic.spread),
                tuple(range(1 + group * shared, 1 + (group + 1) * shared)),
            )
        )
        now += _gap(dice, traffic)
    return Trace(f"synthetic, {traffic.rate:g} requests/s", tuple(requests))


def _gap(dice: random.Random, traffic: TrafficPattern) -> float:
    """A gamma variate with mean 1 / rate and the standard deviation `burst` / rate."""
    if not traffic.burst:
        return 1.0 / traffic.rate
    shape = traffic.burst**-2
    return dice.gammavariate(shape, 1.0 / (shape * traffic.rate))


def _length(dice: random.Random, mean: int, spread: float) -> int:
    variance = math.log1p(spread * spread)
    return max(1, round(mean * math.exp(dice.gauss(0.0, math.sqrt(variance)) - variance / 2.0)))


MOONCAKE_BLOCK = 512
"""Tokens of a block of Mooncake's `hash_ids`."""
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


LOG_MESSAGE = "generated"
"""Message of the log line of a finished generation (`gateway/sessions/session.py`)."""


def load_trace(path: Path) -> Trace:
    """The trace of a file, by its suffix: .csv (Azure), .jsonl (Mooncake) or .log (the JSON log of this server)."""
    readers: dict[str, Callable[[Path], Trace]] = {".csv": read_azure, ".jsonl": read_mooncake, ".log": read_log}
    if path.suffix not in readers:
        raise InvalidRequest(
            f"{path}: a trace is a file .csv (Azure), .jsonl (Mooncake) or .log (JSON log of `paceline serve`)",
            field="trace",
        )
    try:
        return readers[path.suffix](path)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field="trace") from None


def read_azure(path: Path) -> Trace:
    """Columns TIMESTAMP, ContextTokens and GeneratedTokens. Prefixes are unknown: no request shares one."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != AZURE_COLUMNS:
            raise InvalidRequest(f"{path}: the first line must be {','.join(AZURE_COLUMNS)}", field="trace")
        requests = [_checked(path, line, partial(_azure, row)) for line, row in enumerate(rows, 2)]
    return ordered(path.stem, requests)


def _azure(row: dict[str, str]) -> TraceRequest:
    time, context, generated = (row[name] for name in AZURE_COLUMNS)
    # Seven digits of a second; Python reads six
    moment = datetime.fromisoformat(time[:26])
    seconds = (moment - datetime(moment.year, 1, 1, tzinfo=moment.tzinfo)).total_seconds()
    return _request(seconds, int(context), int(generated), ())


def read_mooncake(path: Path) -> Trace:
    """Lines with `timestamp` in milliseconds, `input_length`, `output_length` and `hash_ids` of 512-token blocks."""
    requests = [_checked(path, line, partial(_mooncake, text)) for line, text in _lines(path)]
    return ordered(path.stem, requests, MOONCAKE_BLOCK)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _mooncake(text: str) -> TraceRequest:
    row = json.loads(text)
    length = int(row["input_length"])
    # The last id may stand for part of a block, which a cache does not store
    full = tuple(int(number) for number in row["hash_ids"][: length // MOONCAKE_BLOCK])
    return _request(float(row["timestamp"]) / 1000.0, length, int(row["output_length"]), full)


def read_log(path: Path) -> Trace:
    """The finished generations of a log of `paceline serve`. Other lines are skipped. Prefixes are unknown."""
    requests = [
        _checked(path, number, partial(_logged, row))
        for number, text in _lines(path)
        if (row := _log_row(text)) is not None
    ]
    if not requests:
        raise InvalidRequest(f"{path}: no line says {LOG_MESSAGE!r}; set `log_requests` in the server", field="trace")
    return ordered(path.stem, requests)


def _log_row(text: str) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except ValueError:  # lines of other programs
        return None
    return row if isinstance(row, dict) and row.get("message") == LOG_MESSAGE else None


def _logged(row: dict[str, Any]) -> TraceRequest:
    end = datetime.fromisoformat(row["time"]).timestamp()
    return _request(end - float(row["seconds"]), int(row["prompt_tokens"]), int(row["output_tokens"]), ())


def _request(arrival: float, prompt: int, output: int, blocks: tuple[int, ...]) -> TraceRequest:
    if prompt < 0 or output < 0 or arrival != arrival:
        raise ValueError("lengths and times must not be negative")
    return TraceRequest(arrival, max(1, prompt), max(1, output), blocks)


def _checked(path: Path, line: int, parse: Callable[[], TraceRequest]) -> TraceRequest:
    try:
        return parse()
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{path}, line {line}: not a request of a trace ({error})", field="trace") from None
