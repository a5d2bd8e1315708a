"""A request that workers die of: it is isolated after the first death, and ended before it kills all of them."""

from collections.abc import Iterator

import msgspec
import pytest

from paceline.core.cluster_config import HealthConfig
from paceline.core.errors import GenerationFailed
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request, ValidatedRequest
from paceline.core.sequence import Origin
from paceline.policy.health import WorkerState
from paceline.policy.routing.router import make_router
from paceline.targets.connection import TargetConnection
from paceline.targets.stream import Stream
from paceline.targets.streams import MAX_DEATHS, StreamTable
from paceline.wire.draft_messages import VERSION
from paceline.wire.gateway_messages import Heartbeat, Output, Welcome
from paceline.wire.worker_spec import Member
from tests.engine.harness import PROMPT, request
from tests.processes.target_harness import fingerprint


@pytest.fixture
def targets() -> Iterator[dict[str, TargetConnection]]:
    made = {}
    for name in ("a", "b"):
        target = TargetConnection(Member(name, "target", "target", "tcp://127.0.0.1:1"), HealthConfig(), None, 1)
        target.state = WorkerState.READY
        target.welcome = Welcome(VERSION, 9, name, "", 40, 256, 8, 4, ["fake"], "fake")
        made[name] = target
    yield made
    for target in made.values():
        target.close()


class Events:
    """The table with its streams, and the events of each request."""

    def __init__(self, targets: dict[str, TargetConnection]) -> None:
        self.targets, self.table = targets, StreamTable(targets, make_router("round_robin"))
        self.events: dict[str, list[OutputEvent]] = {}

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.events[one.id] = []
            self.table.add(Stream(ValidatedRequest.of(one), self.events[one.id].append))
        self.table.assign()

    def answer(self, name: str) -> None:
        """The first token of every stream there that has none in this attempt."""
        for attempt, stream in list(self.targets[name].streams.items()):
            if not stream.has_started and not stream.request.id.startswith("poison"):
                start = len((stream.remaining().committed or ((),))[0] or ())
                self.table.handle_output(self.targets[name], Output(attempt, 0, start, (3,), (Origin.PLAIN,)))

    def die(self, name: str) -> None:
        self.table.release(self.targets[name], "restarted", has_died=True)
        self.table.assign()

    def place(self, request_id: str) -> str:
        return next(
            name
            for name, target in self.targets.items()
            if any(stream.request.id == request_id for stream in target.streams.values())
        )


GOOD = [request(f"good{i}", PROMPT, max_tokens=24) for i in range(6)]
POISON = request("poison", PROMPT, max_tokens=4)


def test_request_that_kills_workers_is_ended_and_refused(targets: dict[str, TargetConnection]) -> None:
    events = Events(targets)
    events.add(*GOOD, POISON)
    for _ in range(MAX_DEATHS):
        place = events.place("poison")
        events.answer(place)
        events.die(place)
    (error,) = events.events["poison"]
    assert isinstance(error, GenerationFailed)
    for one in GOOD:  # all others are still served
        assert not any(isinstance(event, GenerationFailed) for event in events.events[one.id])
        events.place(one.id)
    events.add(request("poison again", PROMPT, max_tokens=4, seed=11))
    assert isinstance(events.events["poison again"][0], GenerationFailed)


def test_stream_with_output_is_no_suspect(targets: dict[str, TargetConnection]) -> None:
    events = Events(targets)
    events.add(GOOD[0])
    for _ in range(3 * MAX_DEATHS):
        place = events.place("good0")
        events.answer(place)
        events.die(place)
    assert events.place("good0")


def test_worker_starts_one_suspect_at_a_time(targets: dict[str, TargetConnection]) -> None:
    events = Events(targets)
    events.add(*GOOD)
    events.die("a")
    suspects = [stream for target in targets.values() for stream in target.streams.values() if stream.is_suspect]
    assert sorted(stream.worker or "" for stream in suspects) == ["a", "b"]
    for _ in range(2):
        for name in targets:
            events.answer(name)
        events.table.assign()
    for one in GOOD:
        assert events.place(one.id)


def test_outputs_have_the_fingerprint_of_their_worker_and_another_one_continues_no_stream(
    targets: dict[str, TargetConnection],
) -> None:
    for name, weights in (("a", "1"), ("b", "2")):
        welcome = targets[name].welcome
        assert welcome is not None
        targets[name].welcome = msgspec.structs.replace(welcome, fingerprint=fingerprint(weights))
    events = Events(targets)
    events.add(*GOOD)
    places = {one.id: events.place(one.id) for one in GOOD}
    assert set(places.values()) == {"a", "b"}
    for name in targets:
        events.answer(name)
    for one in GOOD:
        (output,) = events.events[one.id]
        assert isinstance(output, StepOutput)
        assert output.fingerprint == fingerprint("1" if places[one.id] == "a" else "2").digest
    targets["a"].state = WorkerState.SUSPECTED
    events.die("a")
    assert {stream.request.id for stream in targets["b"].streams.values()} == {i for i in places if places[i] == "b"}


def test_heartbeat_requested_before_a_submission_says_nothing_about_it(targets: dict[str, TargetConnection]) -> None:
    events = Events(targets)
    target = targets["a"]
    target.poll(0.0)  # requests the heartbeat 1
    target.state = WorkerState.READY
    events.add(GOOD[0], GOOD[1])
    lost = Heartbeat(1, 9, 1, True, 1, 0, 0, 1)
    assert target.take_lost_streams(lost) == []
    target.poll(1e9)
    assert target.take_lost_streams(Heartbeat(2, 9, 1, True, 1, 0, 0, 1, attempts=list(target.streams))) == []
    assert len(target.take_lost_streams(Heartbeat(2, 9, 1, True, 1, 0, 0, 1))) == 1


def test_a_worker_whose_memory_is_full_gets_no_streams(targets: dict[str, TargetConnection]) -> None:
    events = Events(targets)
    full = Heartbeat(1, 9, 1, True, 1, 0, 0, 1, is_overloaded=True)
    targets["a"].handle_heartbeat(full, 0.0)
    events.add(*GOOD[:3])
    assert {events.place(request.id) for request in GOOD[:3]} == {"b"}
    targets["b"].handle_heartbeat(full, 0.0)
    events.add(GOOD[3])
    assert len(targets["a"].streams) + len(targets["b"].streams) == 3
    targets["a"].handle_heartbeat(msgspec.structs.replace(full, is_overloaded=False), 1.0)
    events.table.assign()
    assert events.place(GOOD[3].id) == "a"
