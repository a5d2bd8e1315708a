"""The four ways speculation over a network goes wrong: each is detected, logged once with its figure, shown in `status` and on
the metrics page, and answered."""

import logging
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from paceline.runtime.deploy.status import worker_statuses
from paceline.runtime.target_worker.reports import engine_report

from paceline.cli.cluster import view
from paceline.cli.console import out
from paceline.cluster.pairing.pairing import RoundTrip
from paceline.core.clock import WallClock
from paceline.core.cluster_config import HealthConfig
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import BreakerState, ClusterStatus, EngineStatus, WorkerStatus
from paceline.engine.loop import EngineLoop
from paceline.runtime.deploy.directory import Member
from paceline.runtime.draft_pool.connection import DraftConnection
from paceline.runtime.draft_pool.control import PoolControl
from paceline.runtime.draft_pool.proposer import PoolProposer
from paceline.runtime.draft_pool.statistics import STALE_SECONDS, PoolStatistics
from paceline.runtime.gateway_client.target_connection import TargetLine
from paceline.runtime.target_worker.kv_pressure import KvPressure
from paceline.runtime.wire.messages import MAX_DEPTH, Load
from paceline.runtime.wire.stream_messages import TO_GATEWAY, Heartbeat, SetFlags, StatusReport, StatusRequest, Welcome
from paceline.runtime.wire.transport import Connection
from paceline.server.metrics.metrics import Metrics
from paceline.speculation.depth.breaker import Breaker, BreakerRule
from tests.fakes import TINY, request, run, tiny_engine, tiny_model
from tests.runtime.pools import ScriptedCore, lockstep
from tests.runtime.target_harness import WorkerThread, until

SNAPSHOT = EngineStatus(1, 0, 90, 100, 0, 0, SpeculationFlags(True, "pool", 6), ())
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
    """The target's row of the table, as a gateway makes it from what came over the wire."""
    side = PoolControl(proposer, cast(EngineLoop, None))
    report = TO_GATEWAY.decode(TO_GATEWAY.encode(engine_report("target-0", 9, SNAPSHOT, side, pressure.active)))
    assert isinstance(report, StatusReport)
    member = Member("target-0", "target", "target", "tcp://127.0.0.1:1")
    line = TargetLine(member, HealthConfig(), None, 1)
    try:
        line.reader(Heartbeat(1, 9, 5, True, 3, 1, 10, 100), 0.0)
        line.welcome = Welcome(2, 1, 9, "target-0", "v", 40, 256, 8, 4, ["pool"], "pool")
        line.report = report
        (row,) = worker_statuses([member], [line])
    finally:
        line.close()
    return row


SICK = {
    "low_acceptance": (FakeConnection(), 1, 1.0, 2.0),
    "slow_draft": (FakeConnection(pass_us=5000), 4, DEPTH * 0.005, STEP),
    "slow_network": (FakeConnection(trip=0.010), 4, 0.010, DEPTH * 0.001),
}


@pytest.mark.parametrize("name", [*SICK, "kv_pressure"])
def test_told_once_with_its_figure_and_shown_everywhere(name: str, caplog: pytest.LogCaptureFixture) -> None:
    proposer, pressure = PoolProposer((), "v", 40), KvPressure()
    with caplog.at_level(logging.WARNING):
        if name == "kv_pressure":
            figure, limit = 0.5, 0.0
            for look in range(20):
                pressure.observe(replace(SNAPSHOT, preemptions=5 * look), 10 * look)
        else:
            connection, accepted, figure, limit = SICK[name]
            observed(proposer._statistics, connection, accepted, now=WallClock().now())
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"{name}: {figure:.4g} against {limit:.4g}; ")
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


def test_a_healthy_pool_has_no_symptom() -> None:
    statistics = PoolStatistics()
    connection = observed(statistics, FakeConnection())
    assert statistics.symptoms(0.0) == ()
    assert statistics.max_depth(connection) == MAX_DEPTH
    assert not statistics.wants_branches(connection)


def test_nothing_is_wrong_where_nobody_speculates_any_more() -> None:
    statistics, pressure = PoolStatistics(), KvPressure()
    connection = observed(statistics, FakeConnection(pass_us=5000), now=100.0)
    assert [symptom.name for symptom in statistics.symptoms(100.0 + STALE_SECONDS / 2)] == ["slow_draft"]
    assert statistics.symptoms(100.0 + STALE_SECONDS) == ()
    assert statistics.max_depth(connection) == 3, "the next request finds the draft as slow as the last one did"

    for look in range(4):
        pressure.observe(replace(SNAPSHOT, preemptions=5 * look), 10 * look)
    last, flags = replace(SNAPSHOT, preemptions=15), SpeculationFlags(max_depth=4)
    for _ in range(9):
        pressure.observe(last, 30)
    assert pressure.limit(flags).max_depth == 1, "a long step says nothing"
    assert [pressure.observe(replace(last, running=0), 30) for _ in range(3)] == [False, False, True]
    assert pressure.active == ()
    assert pressure.limit(flags) == flags


def test_a_slow_draft_is_asked_for_less() -> None:
    statistics = PoolStatistics()
    assert statistics.max_depth(observed(statistics, FakeConnection(pass_us=5000))) == 3, (
        "what it drafts in a step of 15 ms"
    )


def test_a_slow_network_is_sent_ahead_over() -> None:
    statistics = PoolStatistics()
    connection = observed(statistics, FakeConnection(trip=0.010))
    assert statistics.wants_branches(connection)


def test_one_quick_answer_among_slow_ones_does_not_call_it_off() -> None:
    """On a busy machine a worker at hand is sometimes quick: what a step waits for is what it mostly takes."""
    statistics = PoolStatistics()
    connection = observed(statistics, FakeConnection(trip=0.0002))
    for _ in range(15):
        connection.round_trip.observe(0.0025, was_waiting=True)
    assert connection.round_trip.seconds == 0.0002
    assert statistics.wants_branches(connection)


def test_low_acceptance_ends_in_plain_decoding_and_stays_seen() -> None:
    """By the breaker, long before the symptom is sure: it must not be forgotten because nothing is drafted any more."""
    target = tiny_model()
    core = ScriptedCore(lambda ids: TINY.vocab_size - 1)
    with lockstep(core, TINY.vocab_size) as (proposer, worker):
        breaker = Breaker(BreakerRule(window=4, trips=2, cooldown=1e6, max_cooldown=1e6))
        engine = tiny_engine(target, proposer, depth=4, breaker=breaker)
        run(engine, [request("r", (1, 2, 3), max_tokens=150, ignore_eos=True)])
        assert breaker.state("fake/default") is BreakerState.OPEN
        assert worker.status().rounds < 20
        (symptom,) = [one for one in proposer.inner.status().symptoms if one.name == "low_acceptance"]
        assert symptom.figure < 1.0


def test_a_worker_that_preempts_goes_down_to_a_depth_of_one_and_up_again() -> None:
    """What the scheduler counts is what the worker goes by, whenever it is asked for a report."""
    target = WorkerThread("a")
    engine, line = target.engine, Connection(target.worker.address, TO_GATEWAY)

    def report() -> StatusReport:
        engine.num_steps += 10  # it is idle: nobody else counts
        line.send(StatusRequest())
        answer = line.receive(10.0)
        assert isinstance(answer, StatusReport)
        return answer

    try:
        line.send(SetFlags(SpeculationFlags(True, None, 4)))
        until(lambda: engine.validator.flags.max_depth == 4)
        assert report().symptoms == []
        for _ in range(3):
            engine.scheduler.num_preemptions += 5
            told = report().symptoms
        assert [(one.name, one.figure) for one in told] == [("kv_pressure", 0.5)]
        until(lambda: engine.validator.flags.max_depth == 1)
        for _ in range(3):
            told = report().symptoms
        assert told == []
        until(lambda: engine.validator.flags.max_depth == 4)
    finally:
        line.close()
        target.stop()
