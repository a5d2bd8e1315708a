import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from paceline.core.errors import InvalidRequest
from paceline.planning.observation import Observation, PoolState
from paceline.planning.planner.capacity import RequestShape, WorkerCapacity
from paceline.planning.planner.planner import Decision, Planner, PlannerConfig
from paceline.planning.planner.sizing import ClusterLimits
from paceline.planning.profile import ProfileValue, load_profile
from paceline.planning.simulator.result import Objective
from paceline.planning.simulator.settings.config import Speculation

H200 = load_profile("h200-8b")
OBJECTIVE = Objective(1.0, 0.03, 0.95)
CONFIG = PlannerConfig(H200, OBJECTIVE, hold=300.0)
CAPACITY = WorkerCapacity(H200, OBJECTIVE, None)
DRAFTING = WorkerCapacity(H200, OBJECTIVE, Speculation((0.8,)))
INTERVAL = CONFIG.interval


def observation(time: float, rate: float, targets: int, **fields: Any) -> Observation:
    """An interval of steady traffic: prompts of 1,000 tokens, answers of 100."""
    count = round(rate * INTERVAL)
    usual: dict[str, Any] = {
        "arrivals": count,
        "prompt_tokens": 1000 * count,
        "started": count,
        "started_tokens": 1000 * count,
        "finished": count,
        "output_tokens": 100 * count,
        "running": round(rate),
        "pools": {"target": PoolState(ready=targets)},
    }
    return Observation(time, INTERVAL, **{**usual, **fields})


def run(planner: Planner, rates: list[float], start: int = 1) -> list[Decision]:
    """The decisions for a load that follows `rates`, with pools of the decided size, which miss what is over it."""
    size, each = start, CAPACITY.requests_per_second(RequestShape(1000, 100))
    for number, rate in enumerate(rates, 1):
        missed = round(max(0.0, rate - size * each) * INTERVAL)
        size = planner.decide(observation(number * INTERVAL, rate, size, missed=missed))["target"]
    return list(planner.decisions)


def final(config: PlannerConfig, rate: float) -> int:
    capacity = CAPACITY if config.objective == OBJECTIVE else None
    return run(Planner(config, capacity), [rate] * 12)[-1].sizes["target"]


def test_pools_follow_the_load_up_and_down_without_flapping() -> None:
    planner = Planner(CONFIG, CAPACITY)
    high, low = [200.0] * 20, [10.0] * 40
    decisions = run(planner, low + high + low + low)
    sizes = [one.sizes["target"] for one in decisions]
    assert sizes[59] > 2 * sizes[39]
    assert sizes[-1] == sizes[39]
    assert planner.direction_changes == 1
    grown = next(one for one in decisions if one.changes and one.cause == "forecast")
    assert "requests/s that are expected" in grown.reason
    assert grown.dollars_per_hour == pytest.approx(grown.sizes["target"] * H200.price_per_hour.value)
    assert any(one.cause == "idle" and "would have carried" in one.reason for one in decisions)


def test_a_short_hold_shrinks_a_pool_sooner() -> None:
    high, low = [80.0] * 20, [10.0] * 25
    kept, shrunk = (run(Planner(replace(CONFIG, hold=hold), CAPACITY), high + low)[-1] for hold in (300.0, 60.0))
    assert shrunk.sizes["target"] < kept.sizes["target"]


def test_sizes_grow_with_load_and_with_a_tighter_objective() -> None:
    by_load = [final(CONFIG, rate) for rate in (5.0, 20.0, 60.0, 120.0)]
    assert by_load == sorted(by_load)
    assert by_load[0] < by_load[-1]
    by_objective = [final(replace(CONFIG, objective=Objective(1.0, tpot, 0.95)), 60.0) for tpot in (0.03, 0.008, 0.006)]
    assert by_objective == sorted(by_objective)


def test_sizes_do_not_grow_with_prices_under_a_limit_of_dollars() -> None:
    limits = ClusterLimits(64, 30.0)
    sizes = [
        final(
            replace(CONFIG, limits=limits, profile=replace(H200, price_per_hour=ProfileValue(price, "assumed"))), 120.0
        )
        for price in (1.0, 3.0, 9.0)
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_no_decision_is_over_its_limits() -> None:
    dice = random.Random(0)
    for _ in range(12):
        limits = ClusterLimits(dice.randint(1, 12), dice.uniform(2.7, 30.0))
        config = replace(CONFIG, limits=limits, speculation=Speculation((0.8,)) if dice.random() < 0.5 else None)
        planner = Planner(config, DRAFTING if config.speculation else CAPACITY)
        for number in range(1, 15):
            pools = {
                "target": PoolState(dice.randint(0, limits.workers), dice.randint(0, 2), dice.randint(0, 1)),
                "draft": PoolState(dice.randint(0, 3)),
            }
            seen = observation(
                number * INTERVAL, dice.uniform(0.0, 300.0), 1, pools=pools, waiting=dice.randint(0, 500)
            )
            sizes = planner.decide(seen)
            leaving = pools["target"].draining
            if sizes["target"] > config.fewest:
                assert sum(sizes.values()) + leaving <= limits.workers
            decision = planner.decisions[-1]
            assert decision.dollars_per_hour <= limits.dollars_per_hour or sizes["target"] == config.fewest


def test_a_limit_that_is_too_low_is_reported_and_does_not_block() -> None:
    decision = run(Planner(replace(CONFIG, limits=ClusterLimits(2)), CAPACITY), [200.0] * 12)[-1]
    assert decision.sizes["target"] == 2
    assert decision.cause == "limits"
    assert not decision.is_enough
    assert "The limits allow 2 of" in decision.reason


def test_an_objective_that_no_worker_meets_is_reported() -> None:
    decision = run(Planner(replace(CONFIG, objective=Objective(1e-4, 1e-4))), [20.0] * 8, 3)[-1]
    assert decision.sizes["target"] == 3
    assert "more workers do not help" in decision.reason


def test_a_queue_adds_workers_before_the_forecast_does() -> None:
    planner = Planner(CONFIG, CAPACITY)
    run(planner, [20.0] * 12)
    size = planner.decisions[-1].sizes["target"]
    planner.decide(observation(13 * INTERVAL, 20.0, size, waiting=2000))
    assert planner.decisions[-1].cause == "queue"
    assert planner.decisions[-1].sizes["target"] > size


def test_without_traffic_a_pool_shrinks_to_the_fewest() -> None:
    assert run(Planner(CONFIG, CAPACITY), [60.0] * 12 + [0.0] * 60, 1)[-1].sizes["target"] == CONFIG.fewest


def test_any_observation_gives_a_decision_within_the_limits() -> None:
    """NaN, infinities, negative numbers, gaps, and clocks that jump."""
    dice = random.Random(1)
    strange = (math.nan, math.inf, -math.inf, -1, 0)
    planner = Planner(replace(CONFIG, limits=ClusterLimits(16)), CAPACITY)
    names = (
        "arrivals",
        "finished",
        "output_tokens",
        "waiting",
        "running",
        "kv_use",
        "busy",
        "started",
        "started_tokens",
    )
    time = 0.0
    for _ in range(200):
        time += dice.choice((INTERVAL, INTERVAL, INTERVAL, 0.0, -50.0, 1e5))
        fields: dict[str, Any] = {name: dice.choice(strange) for name in names if dice.random() < 0.05}
        fields |= {"waiting": 10**12} if dice.random() < 0.05 else {}
        seen = observation(time, dice.uniform(0.0, 100.0), dice.randint(0, 16), **fields)
        if dice.random() < 0.1:
            seen = replace(seen, seconds=dice.choice((0.0, -1.0, math.nan)))
        sizes = planner.decide(seen)
        assert 1 <= sizes["target"] <= 16
    causes = {one.cause for one in planner.decisions}
    assert "invalid" in causes
    assert len(causes) > 1


def test_draft_workers_come_where_they_pay_and_go_first() -> None:
    cheap = replace(H200, draft_price_per_hour=ProfileValue(0.2, "assumed"))
    config = replace(CONFIG, profile=cheap, speculation=Speculation((0.8,)))
    for running, expects in ((1, True), (256 * 4, False)):
        planner = Planner(config, DRAFTING)
        for number in range(1, 6):
            pools = {"target": PoolState(ready=4), "draft": PoolState(ready=1)}
            sizes = planner.decide(observation(number * INTERVAL, 40.0, 4, pools=pools, running=running))
        assert (sizes["draft"] > 0) == expects


@pytest.mark.parametrize(
    ("fields", "match"),
    [({"interval": 0.0}, "interval"), ({"fewest": 65}, "over the limits"), ({"fewest": 0}, "at least 1")],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        replace(CONFIG, **fields)


def test_forecasts_follow_a_trend_and_a_season() -> None:
    from paceline.planning.planner.forecast import Forecast

    rising = Forecast(4)
    for value in range(40):
        rising.add(float(value))
    assert rising.predict(0.9).upper >= 42.0
    seasonal = Forecast(4, period=20)
    for step in range(120):
        seasonal.add(10.0 + 8.0 * math.sin(step / 20 * 2 * math.pi))
    predicted = seasonal.predict(0.5)
    assert predicted.method == "season"
    assert predicted.expected == pytest.approx(10.0 + 8.0 * math.sin((119 + 4) / 20 * 2 * math.pi), abs=1.0)
    assert all(one <= other for one, other in pairwise([seasonal.predict(share).upper for share in (0.1, 0.5, 0.9)]))
