import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.core.errors import InvalidConfig
from paceline.planning.profile import ProfileCurve, ProfileValue, load_profile
from paceline.planning.simulator.result import Objective, SimulationReport, summarize
from paceline.planning.simulator.settings.config import Mode, SimulationConfig, Speculation
from paceline.planning.simulator.simulation import simulate
from paceline.planning.traces.trace import Trace, TraceRequest
from paceline.planning.traces.trace_files import TrafficPattern, synthesize
from paceline.policy.step import DEFAULT_OBJECTIVES, prompt_budget

H200 = load_profile("h200-8b")
STEADY = synthesize(TrafficPattern(20.0, 800, 200), 60.0)
MODES: tuple[Mode, ...] = ("closed_form", "stepwise")
OBJECTIVE = Objective(ttft=0.5, tpot=0.02)


def report(config: SimulationConfig, trace: Trace = STEADY) -> SimulationReport:
    return summarize(simulate(config, trace), OBJECTIVE)


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    config = SimulationConfig(H200)
    [job] = simulate(config, Trace("t", (TraceRequest(0.0, 500, 3),))).jobs
    attention = H200.prompt_context_seconds.value * 500 * 500 / 2
    assert job.ttft == pytest.approx(H200.rows_seconds(0, 500) + attention)
    steps = sum(H200.verify_seconds(1, 0, context) for context in (501, 502))
    assert job.finished - job.first_token == pytest.approx(steps)


def test_long_prompts_are_computed_in_chunks_by_the_rule_of_the_executor() -> None:
    [job] = simulate(SimulationConfig(H200), Trace("t", (TraceRequest(0.0, 10_000, 1),))).jobs
    seconds, waiting = 0.0, 10_000
    while waiting:
        rows = min(waiting, prompt_budget(0, waiting))
        seconds += H200.prompt_seconds.at(rows)
        waiting -= rows
    assert job.ttft == pytest.approx(seconds + H200.prompt_context_seconds.value * 1e8 / 2)


@pytest.mark.parametrize("mode", MODES)
def test_short_prompts_pass_long_ones(mode: Mode) -> None:
    requests = [TraceRequest(0.0, 100, 2000), TraceRequest(0.1, 100_000, 1), TraceRequest(0.2, 200, 1)]
    running, long, short = simulate(SimulationConfig(H200, mode=mode), Trace("t", tuple(requests))).jobs
    assert short.finished < long.finished
    assert short.ttft < 2.2 * DEFAULT_OBJECTIVES.tpot
    assert running.finished > long.finished


def test_a_step_computes_no_more_prompt_rows_than_the_objective_allows() -> None:
    slow = replace(H200, prompt_seconds=None, pass_seconds=ProfileCurve(((1, 0.01), (8192, 8.0)), "assumed"))
    requests = [TraceRequest(0.0, 100, 400), TraceRequest(0.5, 8000, 1), TraceRequest(0.6, 50, 1)]
    _, _, short = simulate(SimulationConfig(slow), Trace("t", tuple(requests))).jobs
    assert short.ttft < 3 * DEFAULT_OBJECTIVES.tpot


def test_plain_steps_in_closed_form_are_the_steps_one_by_one() -> None:
    closed = simulate(SimulationConfig(H200, workers=2), STEADY)
    stepwise = simulate(SimulationConfig(H200, workers=2, mode="stepwise"), STEADY)
    assert closed.steps == stepwise.steps
    for one, other in zip(closed.jobs, stepwise.jobs, strict=True):
        assert (one.first_token, one.finished) == pytest.approx((other.first_token, other.finished))


@pytest.mark.parametrize("speculation", [Speculation((0.8,)), Speculation((0.8, 0.7), spread=1.0)])
def test_speculation_in_closed_form_is_within_one_percent_of_sampled_steps(speculation: Speculation) -> None:
    closed, stepwise = (
        [report(SimulationConfig(H200, 2, speculation=speculation, mode=mode, seed=seed)) for seed in range(3)]
        for mode in ("closed_form", "stepwise")
    )
    for figure in (
        lambda one: one.ttft.mean,
        lambda one: one.tpot.mean,
        lambda one: one.tpot.p50,
        lambda one: one.tokens_per_second,
        lambda one: one.utilisation,
        lambda one: one.steps,
    ):
        assert sum(map(figure, closed)) == pytest.approx(sum(map(figure, stepwise)), rel=0.01)


def test_the_production_policy_drafts_about_as_the_expected_best() -> None:
    trace = STEADY.first(15.0)
    expected, policy = (
        report(SimulationConfig(H200, 2, speculation=Speculation((0.8,), rule=rule), mode="stepwise"), trace)
        for rule in ("expected", "policy")
    )
    assert policy.tpot.mean == pytest.approx(expected.tpot.mean, rel=0.1)


def test_the_same_arguments_give_the_same_result() -> None:
    config = SimulationConfig(H200, 3, speculation=Speculation((0.7,)))
    assert report(config) == report(config)


def test_texts_that_differ_in_acceptance_have_slower_ones_with_the_same_mean() -> None:
    trace = Trace("t", tuple(TraceRequest(0.0, 200, 200) for _ in range(200)))
    configs = [
        SimulationConfig(H200, speculation=Speculation((0.7,), spread=spread), streams=1) for spread in (0.0, 1.0)
    ]
    alike, different = (report(config, trace) for config in configs)
    assert different.tpot.p99 > 1.1 * alike.tpot.p99
    kinds = [
        [job.kind for job in simulate(replace(config, mode=mode), trace).jobs] for config in configs for mode in MODES
    ]
    assert kinds[2] == kinds[3], "the kind of a text does not depend on the mode"
    assert set(kinds[0]) == {0}
    assert len(set(kinds[2])) > 8


def test_speculation_saves_time_at_small_batches_and_is_off_at_alpha_0() -> None:
    plain = report(SimulationConfig(H200, 2))
    assert report(SimulationConfig(H200, 2, speculation=Speculation((0.8,)))).tpot.mean < 0.7 * plain.tpot.mean
    without = report(SimulationConfig(H200, 2, 2, speculation=Speculation((0.0,))))
    assert without.tpot.mean == pytest.approx(plain.tpot.mean, rel=1e-6)


def test_more_load_is_slower_and_more_workers_are_faster() -> None:
    by_load = [report(SimulationConfig(H200, 1), STEADY.scaled(scale)) for scale in (0.5, 1.0, 2.0)]
    assert all(one.tpot.mean < two.tpot.mean for one, two in pairwise(by_load))
    by_count = [report(SimulationConfig(H200, count)) for count in (1, 2, 4)]
    assert all(one.tpot.mean > two.tpot.mean for one, two in pairwise(by_count))


def test_shared_prefixes_are_computed_once_a_worker() -> None:
    trace = synthesize(TrafficPattern(20.0, 1200, 50, prefix_tokens=1024, spread=0.0), 30.0)
    hits = {policy: report(SimulationConfig(H200, 4, router=policy), trace) for policy in ("kv_aware", "round_robin")}
    ideal = 1024 / 1200
    assert hits["kv_aware"].hit_rate == pytest.approx(ideal, rel=0.02)
    assert hits["round_robin"].hit_rate <= hits["kv_aware"].hit_rate


def test_the_router_keeps_groups_of_prefixes_together_where_one_cache_cannot_hold_them() -> None:
    small = replace(H200, kv_tokens=ProfileValue(40_000, "assumed"))
    trace = synthesize(TrafficPattern(10.0, 2100, 20, prefix_tokens=2048, prefix_groups=40, spread=0.0), 60.0)
    kv_aware, round_robin = (
        report(SimulationConfig(small, 4, router=policy), trace) for policy in ("kv_aware", "round_robin")
    )
    assert kv_aware.hit_rate > round_robin.hit_rate + 0.15
    assert kv_aware.ttft.mean < round_robin.ttft.mean


def test_requests_wait_for_the_kv_cache_and_those_that_never_fit_are_rejected() -> None:
    small = replace(H200, kv_tokens=ProfileValue(1000, "assumed"))
    requests = (TraceRequest(0.0, 600, 100), TraceRequest(0.0, 600, 100), TraceRequest(0.0, 2000, 1))
    result = simulate(SimulationConfig(small), Trace("t", requests))
    one, two = result.jobs
    assert two.first_token > one.finished
    assert result.rejected == 1
    assert summarize(result, Objective()).attainment == pytest.approx(2 / 3)


def test_a_full_batch_makes_requests_wait() -> None:
    narrow = replace(H200, max_num_seqs=ProfileValue(1, "assumed"))
    requests = tuple(TraceRequest(0.0, 10, 10) for _ in range(3))
    jobs = simulate(SimulationConfig(narrow), Trace("t", requests)).jobs
    assert all(two.first_token > one.finished for one, two in pairwise(jobs))


def test_streams_send_the_next_request_when_one_ends() -> None:
    trace = Trace("t", tuple(TraceRequest(0.0, 100, 20) for _ in range(50)))
    jobs = simulate(SimulationConfig(H200, streams=4), trace).jobs
    assert len(jobs) == 50
    for job in jobs:
        assert sum(other.arrival <= job.arrival < other.finished for other in jobs) <= 4


def test_streams_start_one_after_the_other() -> None:
    trace = Trace("t", tuple(TraceRequest(0.0, 100, 8) for _ in range(6)))
    jobs = simulate(SimulationConfig(H200, streams=3, ramp_seconds=0.01), trace).jobs
    assert [job.arrival for job in jobs[:3]] == pytest.approx([0.0, 0.01, 0.02])
    late = simulate(SimulationConfig(H200, streams=3, ramp_seconds=60.0), trace).jobs
    assert len(late) == 6
    assert late[-1].finished < 60.0  # the first stream has sent them all


def test_a_draft_pool_costs_its_price_and_shares_its_time() -> None:
    speculation = Speculation((0.8,))
    wide = report(SimulationConfig(H200, 2, 2, speculation=speculation))
    narrow = report(SimulationConfig(H200, 2, 1, speculation=speculation))
    assert wide.tpot.mean < narrow.tpot.mean
    assert wide.dollars / wide.seconds > narrow.dollars / narrow.seconds


def test_figures_of_the_report() -> None:
    one = report(SimulationConfig(H200, 2))
    assert one.requests == len(STEADY.requests)
    assert one.output_tokens == sum(request.output_tokens for request in STEADY.requests)
    assert one.ttft.p50 <= one.ttft.p90 <= one.ttft.p99
    assert 0.0 < one.utilisation <= 1.0
    assert one.dollars == pytest.approx(2 * 2.69 * one.seconds / 3600)
    assert one.dollars_per_million == pytest.approx(one.dollars / one.output_tokens * 1e6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": 0}, "needs a target worker"),
        ({"draft_workers": 1}, "need an alpha"),
        ({"streams": 0}, "streams must be"),
        ({"ramp_seconds": -1.0}, "between two streams"),
        ({"speculation": Speculation((0.5,), rule="policy")}, "use the stepwise mode"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(values: dict, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        SimulationConfig(H200, **values)


@pytest.mark.parametrize("alphas", [(), (1.5,), (math.nan,)])
def test_alphas_are_probabilities(alphas: tuple[float, ...]) -> None:
    with pytest.raises(InvalidConfig, match="alpha must be"):
        Speculation(alphas)


def test_public_traces_run_if_they_are_there() -> None:
    from paceline.planning.traces.trace_files import load_trace

    folder = Path(__file__).parents[4] / "shared" / "data"
    path = folder / "mooncake_conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip("the trace is not here")
    one = report(SimulationConfig(H200, 8), load_trace(path).first(60.0))
    assert one.rejected == 0
    assert one.hit_rate > 0.03
