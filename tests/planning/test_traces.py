from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from paceline.core.errors import InvalidRequest
from paceline.planning.traces.trace import Trace, TraceRequest
from paceline.planning.traces.trace_files import TrafficPattern, load_trace, synthesize

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,0\n"
)
MOONCAKE = (
    '{"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n\n'
    '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]}\n'
)


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_azure_csv(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / "code.csv", AZURE))
    assert trace.name == "code"
    assert [(one.prompt_tokens, one.output_tokens) for one in trace.requests] == [(4808, 10), (3180, 1)]
    assert trace.seconds == pytest.approx(0.052)


def test_mooncake_lines_are_ordered_and_keep_full_blocks_only(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / "m.jsonl", MOONCAKE))
    assert trace.block_tokens == 512
    assert trace.requests == (TraceRequest(0.0, 600, 7, (0,)), TraceRequest(0.5, 1100, 5, (0, 1)))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "a,b\n", "the first line must be"),
        ("a.csv", AZURE + "2023-11-16 18:17:05,x,1\n", "line 4: not a request"),
        ("a.csv", AZURE + "2023-11-16 18:17:05,-5,1\n", "line 4: not a request"),
        ("a.csv", AZURE.splitlines()[0] + "\n", "has no requests"),
        ("a.jsonl", "{}\n", "line 1: not a request"),
        ("a.jsonl", "[]\n", "line 1: not a request"),
        ("a.jsonl", "nonsense\n", "line 1: not a request"),
        ("a.txt", "", "a trace is a file"),
    ],
)
def test_errors_name_the_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load_trace(write(tmp_path / name, text))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        load_trace(tmp_path / "none.csv")


def test_a_scaled_trace_has_copies_with_prefixes_of_their_own() -> None:
    trace = Trace("t", tuple(TraceRequest(float(i), 32, 1, (0,)) for i in range(1000)))
    scaled = trace.scaled(2.5)
    assert len(scaled.requests) == pytest.approx(2500, rel=0.03)
    assert {one.copy for one in scaled.requests} == {0, 1, 2}
    arrivals = [one.arrival for one in scaled.requests]
    assert arrivals == sorted(arrivals)
    assert trace.scaled(1.0) is trace
    assert len(trace.first(10.0).requests) == 10
    with pytest.raises(InvalidRequest, match="above 0"):
        trace.scaled(0.0)


def test_synthetic_traffic_has_the_rate_and_lengths_that_it_names() -> None:
    trace = synthesize(TrafficPattern(50.0, 400, 100, prefix_tokens=160, prefix_groups=3), 100.0)
    assert len(trace.requests) == pytest.approx(5000, rel=0.05)
    assert mean(one.prompt_tokens for one in trace.requests) == pytest.approx(400, rel=0.02)
    assert mean(one.output_tokens for one in trace.requests) == pytest.approx(100, rel=0.03)
    assert {one.blocks for one in trace.requests} == {tuple(range(1 + 10 * g, 11 + 10 * g)) for g in range(3)}
    assert trace == synthesize(TrafficPattern(50.0, 400, 100, prefix_tokens=160, prefix_groups=3), 100.0)


@pytest.mark.parametrize("burst", [0.0, 0.5, 1.0, 3.0])
def test_bursts_are_the_deviation_of_gaps(burst: float) -> None:
    arrivals = [one.arrival for one in synthesize(TrafficPattern(20.0, 10, 1, burst=burst), 500.0).requests]
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert pstdev(gaps) / mean(gaps) == pytest.approx(burst, rel=0.1, abs=1e-9)


@pytest.mark.parametrize(
    "values",
    [
        {"rate": 0.0},
        {"rate": float("nan")},
        {"output_tokens": 0},
        {"prefix_tokens": 10},
        {"prefix_groups": 0},
        {"burst": -1.0},
    ],
)
def test_traffic_that_cannot_be_is_refused(values: dict) -> None:
    with pytest.raises(InvalidRequest):
        TrafficPattern(**({"rate": 1.0, "prompt_tokens": 10, "output_tokens": 5} | values))
