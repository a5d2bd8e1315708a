from collections.abc import Mapping
from dataclasses import replace

import pytest

from paceline.core.errors import InvalidRequest
from paceline.core.pool_config import Role
from paceline.planning.observation import Observation
from paceline.planning.profile import ProfileValue, load_profile
from paceline.planning.simulator.result import Objective, SimulationResult, summarize
from paceline.planning.simulator.settings.config import (
    AlphaDrift,
    Fault,
    SimulationConfig,
    SlowLinks,
    Speculation,
    WorkersLost,
    parse_fault,
)
from paceline.planning.simulator.simulation import Scaling, simulate
from paceline.planning.traces.trace_files import TrafficPattern, synthesize

H200 = load_profile("h200-8b")
LONG = synthesize(TrafficPattern(8.0, 4000, 100), 30.0)
SHORT = synthesize(TrafficPattern(12.0, 300, 150), 30.0)
ALPHA = Speculation((0.8,))


def finished(result: SimulationResult) -> bool:
    """Whether every request has all of its tokens."""
    return all(job.finished >= job.first_token >= job.arrival for job in result.jobs)


@pytest.mark.parametrize("mode", ["closed_form", "stepwise"])
def test_prefill_workers_take_long_prompts_and_decoding_is_smoother(mode: str) -> None:
    config = SimulationConfig(H200, 2, mode=mode)  # type: ignore[arg-type]
    alone = summarize(simulate(config, LONG), Objective())
    with_pool = summarize(simulate(replace(config, prefill_workers=2, link="400gbe"), LONG), Objective())
    assert with_pool.handoffs > 0.5 * len(LONG.requests)
    assert with_pool.failed_handoffs == 0
    assert 0.0 < with_pool.prefill_utilisation < 1.0
    assert with_pool.tpot.p99 < alone.tpot.p99
    assert with_pool.dollars > 1.9 * alone.dollars * with_pool.seconds / alone.seconds


def test_short_prompts_stay_on_their_target() -> None:
    result = simulate(SimulationConfig(H200, 2, prefill_workers=1), synthesize(TrafficPattern(10.0, 40, 20, 0.1), 10.0))
    assert result.handoffs == 0


def test_a_slow_link_makes_hand_offs_not_worth_it() -> None:
    slow = replace(H200, links={"slow": ProfileValue(1e9, "assumed")})
    result = simulate(SimulationConfig(slow, 2, prefill_workers=2, link="slow"), LONG)
    fast = simulate(SimulationConfig(H200, 2, prefill_workers=2, link="400gbe"), LONG)
    assert finished(result)
    assert result.handoffs < 0.7 * fast.handoffs


def test_draft_workers_share_the_sequences_of_all_targets() -> None:
    pool = simulate(SimulationConfig(H200, 4, 2, ALPHA), SHORT)
    drafts = [one.busy_seconds for one in pool.workers if one.role == "draft"]
    assert len(drafts) == 2
    assert min(drafts) > 0.3 * max(drafts) > 0.0
    plain = simulate(SimulationConfig(H200, 4), SHORT)
    times = [summarize(one, Objective()).tpot.mean for one in (pool, plain)]
    assert times[0] < 0.7 * times[1]


@pytest.mark.parametrize("mode", ["closed_form", "stepwise"])
@pytest.mark.parametrize("is_silent", [False, True])
def test_requests_of_a_lost_target_continue_elsewhere(mode: str, is_silent: bool) -> None:
    fault = WorkersLost(10.0, ("target-0", "target-1"), is_silent)
    config = SimulationConfig(H200, 3, faults=(fault,), mode=mode)  # type: ignore[arg-type]
    result = simulate(config, SHORT)
    assert finished(result)
    assert len(result.jobs) == len(SHORT.requests)
    report = summarize(result, Objective())
    assert report.moved > 0
    whole = summarize(simulate(replace(config, faults=()), SHORT), Objective())
    assert report.output_tokens == whole.output_tokens
    assert report.tpot.p99 > whole.tpot.p99


def test_requests_wait_while_no_target_is_ready() -> None:
    result = simulate(SimulationConfig(H200, 1, faults=(WorkersLost(5.0, ("target-0",), end=12.0),)), SHORT)
    assert finished(result)
    late = [job for job in result.jobs if 6.0 < job.arrival < 11.0]
    assert all(job.first_token > 12.0 for job in late)


def test_a_lost_draft_worker_costs_speed_and_no_request() -> None:
    config = SimulationConfig(H200, 2, 1, ALPHA)
    faults: tuple[Fault, ...] = (WorkersLost(5.0, ("draft-0",), end=100.0),)
    whole, broken = (simulate(one, SHORT) for one in (config, replace(config, faults=faults)))
    assert finished(broken)
    early, late = (
        [[job.tpot for job in one.jobs if low < job.arrival < high] for one in (whole, broken)]
        for low, high in ((0.0, 4.0), (6.0, 20.0))
    )
    assert sum(early[1]) == pytest.approx(sum(early[0]), rel=0.2)
    assert sum(late[1]) > 1.5 * sum(late[0])


def test_a_lost_prefill_worker_leaves_its_prompts_to_the_targets() -> None:
    failed = 0
    for arrival in [request.arrival for request in LONG.requests[5:10]]:  # during one of them a hand-off is under way
        fault = WorkersLost(arrival + 0.02, ("prefill-0",), end=100.0)
        result = simulate(SimulationConfig(H200, 2, prefill_workers=1, faults=(fault,)), LONG.first(5.0))
        assert finished(result)
        failed += result.failed_handoffs
    assert failed > 0


def test_alpha_drift_and_slow_links_last_as_long_as_they_are_said_to() -> None:
    config = SimulationConfig(H200, 2, 1, ALPHA)
    usual = simulate(config, SHORT)
    for fault in (AlphaDrift(10.0, 0.2, 20.0), SlowLinks(10.0, 100.0, 20.0)):
        result = simulate(replace(config, faults=(fault,)), SHORT)
        for low, high, is_slower in ((0.0, 9.0, False), (10.5, 19.0, True), (21.0, 30.0, False)):
            sums = [sum(job.tpot for job in one.jobs if low < job.arrival < high) for one in (usual, result)]
            assert (sums[1] > 1.2 * sums[0]) == is_slower


class Steps:
    """Sizes by time."""

    interval = 1.0

    def __init__(self, sizes: Mapping[float, int]) -> None:
        self._sizes = sizes
        self.seen: list[Observation] = []

    def decide(self, observation: Observation) -> dict[Role, int]:
        self.seen.append(observation)
        return {"target": [size for time, size in self._sizes.items() if time <= observation.time][-1]}


def test_a_controller_starts_and_drains_workers_and_nothing_is_lost() -> None:
    quick = replace(H200, start_seconds=ProfileValue(2.0, "assumed"))
    controller = Steps({0.0: 1, 5.0: 4, 15.0: 1})
    result = simulate(SimulationConfig(quick, 1), SHORT, Scaling(controller, Objective(ttft=1.0)))
    assert finished(result)
    assert [one.workers["target"] for one in result.sizes].count(4) == 10
    by_time = {round(one.time): one.pool("target") for one in controller.seen}
    assert by_time[6].starting == 3
    assert by_time[9].ready == 4
    assert by_time[25].ready == 1
    assert result.paid_seconds["target"] < 1.5 * (30 + 3 * 12)
    arrivals = sum(one.arrivals for one in controller.seen)
    assert arrivals == pytest.approx(len(SHORT.requests), abs=40)
    assert all(0.0 <= one.busy <= 1.5 for one in controller.seen)


@pytest.mark.parametrize(
    "text", ["", "worker", "worker:@", "node:a@x", "link:0@1", "alpha:-1@0", "worker:a@5-5", "x:1@1"]
)
def test_faults_that_cannot_be_read_are_errors(text: str) -> None:
    with pytest.raises(InvalidRequest, match="fault"):
        parse_fault(text)
