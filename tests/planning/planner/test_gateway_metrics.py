import pytest

from paceline.planning.observation import PoolState
from paceline.planning.planner.gateway_metrics import MetricsReader, parse, with_wanted
from paceline.planning.simulator.result import Objective

PAGE = """
# HELP paceline_requests_total Finished requests.
paceline_requests_total{{category="a",outcome="stop"}} {finished}
paceline_requests_total{{category="b",outcome="length"}} 1
paceline_time_to_first_token_seconds_bucket{{le="0.5"}} {fast}
paceline_time_to_first_token_seconds_bucket{{le="1.0"}} {fast}
paceline_time_to_first_token_seconds_bucket{{le="+Inf"}} {started}
paceline_time_to_first_token_seconds_count{{}} {started}
paceline_prompt_tokens_total{{category="a"}} {prompt}
paceline_cached_prompt_tokens_total 0
paceline_generated_tokens_total{{category="a"}} {output}
paceline_queue_choices{{model="m"}} 2
paceline_sequences_waiting 1
paceline_sequences_running {running}
paceline_worker_ready{{worker="target-0",role="target"}} 1
paceline_worker_ready{{worker="target-1",role="target"}} 0
paceline_worker_ready{{worker="draft-0",role="draft"}} 1
paceline_worker_kv_use_ratio{{worker="target-0"}} 0.5
paceline_broken nonsense
"""


def page(**numbers: int) -> str:
    usual = {"finished": 10, "fast": 12, "started": 12, "prompt": 1000, "output": 500, "running": 4}
    return PAGE.format(**{**usual, **numbers})


def test_two_pages_make_an_observation() -> None:
    reader = MetricsReader(Objective(ttft=0.8))
    assert reader.read(page(), 100.0) is None
    seen = reader.read(page(finished=30, started=34, fast=30, prompt=3000, output=1500, running=6), 110.0)
    assert seen is not None
    assert (seen.time, seen.seconds) == (110.0, 10.0)
    assert seen.finished == 20
    assert seen.arrivals == 22  # and two more are in flight
    assert seen.started == 22
    assert seen.missed == 4
    assert (seen.prompt_tokens, seen.output_tokens) == (2000, 1000)
    assert (seen.waiting, seen.running) == (3, 9)
    assert seen.kv_use == 0.5
    assert seen.pool("target") == PoolState(ready=1)
    assert seen.pool("draft") == PoolState(ready=1)
    wanted = with_wanted(seen, {"target": 3, "draft": 0})
    assert wanted.pool("target") == PoolState(1, 2, 0)
    assert wanted.pool("draft") == PoolState(0, 0, 1)


def test_a_gateway_that_restarted_counts_anew() -> None:
    reader = MetricsReader(Objective())
    reader.read(page(finished=100, started=100), 0.0)
    assert reader.read(page(finished=3, started=4), 10.0) is None
    assert reader.read(page(finished=5, started=6), 20.0) is not None


@pytest.mark.parametrize("text", ["", "}{ =", "a{b} c", "x 1e", "\x00"])
def test_any_text_is_parsed(text: str) -> None:
    assert sum(map(len, parse(text).values())) == 0
    reader = MetricsReader(Objective())
    reader.read(text, 0.0)
    seen = reader.read(text, 1.0)
    assert seen is not None
    assert seen.pool("target").ready == 1
