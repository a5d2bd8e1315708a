"""The four failure modes of speculation over a network: each is detected, logged once, shown in `status` and metrics, and
handled."""

import logging
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from paceline.cli.console import out
from paceline.cli.workers import view
from paceline.core.clock import WallClock
from paceline.core.cluster_config import HealthConfig
from paceline.core.request import SpeculationFlags
from paceline.core.status import BreakerState, ClusterStatus, EngineStatus, WorkerStatus
from paceline.drafting.connection import DraftConnection
from paceline.drafting.control import PoolControl
from paceline.drafting.proposer import PoolProposer
from paceline.drafting.trial import STALE_SECONDS, PoolStatistics
from paceline.engine.loop import EngineLoop
from paceline.gateway.metrics.metrics import Metrics
from paceline.policy.depth.breaker import Breaker, BreakerRule
from paceline.policy.pairing.pairing import RoundTrip
from paceline.targets.connection import TargetConnection
from paceline.targets.status import worker_statuses
from paceline.wire.draft_messages import MAX_DEPTH, VERSION, Load
from paceline.wire.gateway_messages import TO_GATEWAY, Heartbeat, SetFlags, StatusReport, StatusRequest, Welcome
from paceline.wire.transport import Connection
from paceline.wire.worker_spec import Member
from paceline.worker.server.symptoms import PRESSURE_SECONDS, KvPressure
from tests.fakes import TINY, request, run, tiny_engine, tiny_model
from tests.processes.pools import TOKENIZER, ScriptedCore, lockstep
from tests.processes.target_harness import WorkerThread, until
from tests.traffic import traffic_class

STATUS = EngineStatus(1, 0, 90, 100, 0, 0, SpeculationFlags(True, "pool", 6), ())
STEP, DEPTH = 0.015, 5


@dataclass(eq=False)
class FakeConnection:
    """A connection to a draft worker with the given speed."""

    pass_us: int = 1000
    trip: float = 0.0002
    is_ready: bool = True
    round_trip: RoundTrip = field(default_factory=RoundTrip)

    def __post_init__(self) -> None:
        self.load = Load(pass_us=self.pass_us)
        self.round_trip.observe(self.trip, was_waiting=True)


def observed(
    statistics: PoolStatistics, connection: FakeConnection, accepted: int = 4, steps: int = 200, now: float = 0.0
) -> DraftConnection:
    """Observe the same step again and again."""
    fake = cast(DraftConnection, connection)
    for _ in range(steps):
        statistics.observe_step(STEP)
        statistics.observe_round(DEPTH, accepted)
        statistics.check([fake], now)
    return fake


def shown(proposer: PoolProposer, pressure: KvPressure) -> WorkerStatus:
    """The target's row of the table, from a report sent over the wire."""
    side = PoolControl(proposer, cast(EngineLoop, None))
    status = replace(STATUS, drafters=tuple(side.drafters()), symptoms=(*side.symptoms(), *pressure.active))
    report = TO_GATEWAY.decode(TO_GATEWAY.encode(StatusReport(9, "target-0", status)))
    assert isinstance(report, StatusReport)
    member = Member("target-0", "target", "target", "tcp://127.0.0.1:1")
    connection = TargetConnection(member, HealthConfig(), None, 1)
    try:
        connection.handle_heartbeat(Heartbeat(1, 9, 5, True, 3, 1, 10, 100), 0.0)
        connection.welcome = Welcome(VERSION, 9, "target-0", "v", 40, 256, 8, 4, ["pool"], "pool")
        connection.report = report
        (row,) = worker_statuses([member], [connection])
    finally:
        connection.close()
    return row


CASES = {
    "low_acceptance": (FakeConnection(), 1, 1.0, 2.0),
    "slow_draft": (FakeConnection(pass_us=5000), 4, DEPTH * 0.005, STEP),
    "slow_network": (FakeConnection(trip=0.010), 4, 0.010, DEPTH * 0.001),
}


@pytest.mark.parametrize("name", [*CASES, "kv_pressure"])
def test_symptom_is_logged_once_and_shown(name: str, caplog: pytest.LogCaptureFixture) -> None:
    proposer, pressure = PoolProposer((), TOKENIZER, 40), KvPressure()
    with caplog.at_level(logging.WARNING):
        if name == "kv_pressure":
            figure, limit = 0.5, 0.0
            for i in range(20):
                pressure.observe(replace(STATUS, preemptions=5 * i), 10 * i)
        else:
            connection, accepted, figure, limit = CASES[name]
            observed(proposer._pool_drafts.current.statistics, connection, accepted, now=WallClock().now())
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{name}: {figure:.4g} against {limit:.4g}; ")
    row = shown(proposer, pressure)
    (symptom,) = row.symptoms
    assert (symptom.name, symptom.figure, symptom.limit) == (name, pytest.approx(figure), pytest.approx(limit))
    with out.capture() as captured:
        out.print(view([row]))
    assert f"! target-0: {name}, {figure:.3g} against" in captured.get()
    metrics = Metrics("m")
    metrics.add_cluster(lambda: ClusterStatus((row,), 0))
    line = f'paceline_symptom{{model="m",role="target",symptom="{name}",worker="target-0"}} 1.0'
    assert line in metrics.render().decode()


def test_healthy_pool_has_no_symptom() -> None:
    statistics = PoolStatistics()
    connection = observed(statistics, FakeConnection())
    assert statistics.symptoms(0.0) == ()
    assert statistics.max_depth(connection) == MAX_DEPTH
    assert not statistics.wants_branches(connection)


def test_symptoms_end_when_speculation_stops() -> None:
    statistics = PoolStatistics()
    connection = observed(statistics, FakeConnection(pass_us=5000), now=100.0)
    assert [symptom.name for symptom in statistics.symptoms(100.0 + STALE_SECONDS / 2)] == ["slow_draft"]
    assert statistics.symptoms(100.0 + STALE_SECONDS) == ()
    assert statistics.max_depth(connection) == 3, "the draft is still slow for the next request"


def test_slow_draft_limits_the_depth() -> None:
    statistics = PoolStatistics()
    assert statistics.max_depth(observed(statistics, FakeConnection(pass_us=5000))) == 3, (
        "tokens drafted in a step of 15 ms"
    )


def test_slow_network_requests_branches() -> None:
    statistics = PoolStatistics()
    connection = observed(statistics, FakeConnection(trip=0.010))
    assert statistics.wants_branches(connection)


def test_one_fast_response_does_not_end_branches() -> None:
    """The median counts: a step usually waits that long."""
    statistics = PoolStatistics()
    connection = observed(statistics, FakeConnection(trip=0.0002))
    for _ in range(15):
        connection.round_trip.observe(0.0025, was_waiting=True)
    assert connection.round_trip.seconds == 0.0002
    assert statistics.wants_branches(connection)


def test_low_acceptance_opens_the_breaker_and_stays_a_symptom() -> None:
    """The breaker opens before the symptom is certain. The symptom stays although no drafts follow."""
    target = tiny_model()
    core = ScriptedCore(lambda ids: TINY.vocab_size - 1)
    with lockstep(core, TINY.vocab_size) as (proposer, worker):
        breaker = Breaker(BreakerRule(window=4, trips=2, cooldown=1e6, max_cooldown=1e6))
        engine = tiny_engine(target, proposer, depth=4, breaker=breaker)
        run(engine, [request("r", (1, 2, 3), max_tokens=150, ignore_eos=True)])
        assert breaker.state(traffic_class("fake/default")) is BreakerState.OPEN
        assert worker.status().rounds < 20
        (symptom,) = [one for one in proposer.inner.status().symptoms if one.name == "low_acceptance"]
        assert symptom.figure < 1.0


class SetClock:
    time = 0.0

    def now(self) -> float:
        return self.time


def test_preemptions_limit_the_depth_to_one_until_they_end() -> None:
    """The worker reads the scheduler's counter about once a second, when its status is requested."""
    clock = SetClock()
    target = WorkerThread("a", clock=clock)
    engine, connection = target.engine, Connection(target.worker.address, TO_GATEWAY)

    def report() -> StatusReport:
        engine.num_steps += 10  # the engine is idle
        clock.time += PRESSURE_SECONDS
        connection.send(StatusRequest())
        answer = connection.receive(10.0)
        assert isinstance(answer, StatusReport)
        return answer

    try:
        connection.send(SetFlags(SpeculationFlags(True, None, 4)))
        until(lambda: engine.validator.flags.max_depth == 4)
        assert report().status.symptoms == ()
        for _ in range(3):
            engine.scheduler.num_preemptions += 5
            symptoms = report().status.symptoms
        assert [(one.name, one.figure) for one in symptoms] == [("kv_pressure", 0.5)]
        until(lambda: engine.validator.flags.max_depth == 1)
        for _ in range(3):
            symptoms = report().status.symptoms
        assert symptoms == ()
        until(lambda: engine.validator.flags.max_depth == 4)
    finally:
        connection.close()
        target.stop()
