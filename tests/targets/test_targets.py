"""The connections of a gateway: which members it connects to, what it tells them, and which it refuses."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from paceline.core.request import SpeculationFlags
from paceline.core.status import EngineStatus
from paceline.policy.health import WorkerState
from paceline.targets.connection import TargetConnection
from paceline.targets.targets import Canaries, Targets
from paceline.wire.draft_messages import VERSION
from paceline.wire.gateway_messages import SetFlags, StatusReport, Welcome, WorkerAddress, WorkerList
from paceline.wire.worker_spec import Member, Phase
from tests.processes.target_harness import cluster, fingerprint

ADDRESS = "tcp://127.0.0.1:1"
WELCOME = Welcome(VERSION, 9, "a", "", 40, 256, 8, 4, ["fake"], "fake", fingerprint=fingerprint())
STATUS = EngineStatus(1, 0, 90, 100, 0, 0, SpeculationFlags(True, "pool", 6), ())


class Sent(list[tuple[str, Any]]):
    """Messages with the name of their worker, instead of those that a socket sends."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    messages = Sent()

    def send(target: TargetConnection, message: Any) -> bool:
        messages.append((target.name, message))
        return True

    monkeypatch.setattr(TargetConnection, "send", send)
    return messages


@pytest.fixture
def targets() -> Iterator[Targets]:
    made = Targets(cluster(), None)
    yield made
    for target in made.values():
        target.close()


def member(
    name: str, role: Any = "target", phase: Phase = "serving", model: str = "m", address: str = ADDRESS
) -> Member:
    return Member(name, role, role, address, phase=phase, model=model)


def address(name: str, is_trial: bool = False) -> WorkerAddress:
    return WorkerAddress(name, ADDRESS, "", is_trial)


def test_members_without_an_address_and_drafts_get_no_connection(targets: Targets) -> None:
    a, p, unknown = member("a"), member("p", "prefill"), member("b", address="")
    members = (a, p, unknown, member("c", phase="gone"), member("d", "draft"), member("e", address="nowhere"))
    targets.connect(members)
    assert list(targets) == ["a", "p"]
    assert targets.members == members


def test_a_worker_that_left_or_moved_is_disconnected(targets: Targets) -> None:
    targets.connect((member("a"), member("b"), member("c")))
    connections = dict(targets)
    now = (member("a", phase="draining"), member("b", address="tcp://127.0.0.1:2"))
    removed = targets.disconnect(now)
    assert removed == [connections["b"], connections["c"]]
    assert targets == {"a": connections["a"]}
    assert targets["a"].member.phase == "draining"
    for target in removed:
        target.close()
    targets.connect(now)
    assert targets["b"].member.address == "tcp://127.0.0.1:2"


def test_targets_know_the_workers_that_they_may_use(targets: Targets, sent: Sent) -> None:
    """Those of their own model. Drafts are shared, and a trial may draft already."""
    targets.connect(
        (
            member("a"),
            member("b", model="other"),
            member("p", "prefill"),
            member("q", "prefill", phase="draining"),
            member("d", "draft", model=""),
            member("e", "draft", phase="trial", model=""),
            member("f", "draft", phase="draining", model=""),
        )
    )
    drafts = [address("d"), address("e", is_trial=True)]
    own, other = WorkerList(drafts, [address("p")]), WorkerList(drafts)
    assert sent == [("a", own), ("b", other), ("p", own), ("q", own)]


def test_targets_that_share_caches_know_each_other(sent: Sent) -> None:
    """A draining target still sends its cached blocks."""
    targets = Targets(cluster(router="kv_aware"), None)
    targets.connect((member("a"), member("b", phase="draining"), member("c", phase="trial")))
    peers = [address("a"), address("b")]
    assert sent == [(name, WorkerList([], [], peers)) for name in "abc"]
    for target in targets.values():
        target.close()


def test_lists_are_sent_when_they_change_or_a_worker_is_unhealthy(targets: Targets, sent: Sent) -> None:
    members = (member("a"), member("p", "prefill"))
    targets.connect(members)
    sent.clear()
    targets.connect(members)
    assert sent == []
    targets["p"].state = WorkerState.UNHEALTHY
    for _ in range(2):  # another gateway may have sent a list with it meanwhile
        targets.send_worker_lists()
        assert sent == [("a", WorkerList([])), ("p", WorkerList([]))]
        sent.clear()


def test_a_worker_that_joins_later_gets_the_list_and_the_flags(targets: Targets, sent: Sent) -> None:
    flags = SpeculationFlags(enabled=True, max_depth=2)
    targets.send_flags(flags)
    targets.connect((member("a"), member("p", "prefill")))
    sent.clear()
    assert targets.handle_welcome(targets["a"], WELCOME)
    assert sent == [("a", WorkerList([], [address("p")])), ("a", SetFlags(flags))]
    assert targets.first_welcome is WELCOME


def test_a_welcome_of_another_version_is_not_taken(targets: Targets, sent: Sent) -> None:
    targets.connect((member("a"),))
    sent.clear()
    assert not targets.handle_welcome(targets["a"], msgspec.structs.replace(WELCOME, version=VERSION + 1))
    assert targets["a"].welcome is None
    assert sent == []


def test_other_weights_are_refused_within_a_pool_and_revision(targets: Targets) -> None:
    targets.connect((member("a"), member("b"), replace(member("c"), revision=1), replace(member("d"), pool="more")))
    assert targets.handle_welcome(targets["a"], WELCOME)
    other = msgspec.structs.replace(WELCOME, fingerprint=fingerprint(device="NVIDIA H100"))
    assert not targets.handle_welcome(targets["b"], other)
    assert targets["b"].refusal == "its texts may differ from those of a: it has device NVIDIA H100, not NVIDIA H200"
    assert targets["b"].welcome is None
    for name in "cd":
        assert targets.handle_welcome(targets[name], other)
    assert targets.handle_welcome(targets["b"], WELCOME)  # restarted with the right ones
    assert targets["b"].refusal == ""


def test_the_fingerprint_is_that_of_all_usable_targets(targets: Targets) -> None:
    targets.connect((member("a"), replace(member("b"), pool="more")))
    assert targets.fingerprint == ""
    for target in targets.values():
        targets.handle_welcome(target, WELCOME)
        target.state = WorkerState.READY
    assert targets.fingerprint == fingerprint().digest
    targets.handle_welcome(targets["b"], msgspec.structs.replace(WELCOME, fingerprint=fingerprint(ranks=2)))
    assert targets.fingerprint == ""
    targets["b"].state = WorkerState.SUSPECTED
    assert targets.fingerprint == fingerprint().digest
    targets.handle_welcome(targets["a"], msgspec.structs.replace(WELCOME, fingerprint=None))
    assert targets.fingerprint == ""


def test_canaries_of_different_fingerprints_are_not_compared(targets: Targets) -> None:
    targets.connect((member("a"), member("b"), member("c")))
    canaries = Canaries(1.0, targets, lambda stream: None)
    wrong: list[str] = []
    for name, target in targets.items():
        target.health.canary = lambda agrees, name=name: None if agrees else wrong.append(name)  # type: ignore[method-assign, misc]
    old, new = (1, 2, 3), (4, 5, 6)
    for name in "abc":
        canaries._compare(name, old, "fp_old")
    for name in "abc":  # their weights change one after the other
        canaries._compare(name, new, "fp_new")
    assert not wrong
    assert list(canaries._votes) == ["fp_new"]
    canaries._compare("b", old, "fp_new")
    assert wrong == ["b"]


def test_capacity_and_reports_are_those_of_usable_targets(targets: Targets) -> None:
    targets.connect((member("a"), member("b")))
    assert targets.max_num_seqs == 1
    for target in targets.values():
        targets.handle_welcome(target, WELCOME)
        target.state = WorkerState.READY
        target.report = StatusReport(9, target.name, STATUS)
    assert targets.max_num_seqs == 16
    targets["b"].state = WorkerState.SUSPECTED
    assert targets.max_num_seqs == 8
    assert [report.name for report in targets.reports] == ["a"]
    targets["a"].state = WorkerState.SUSPECTED
    assert targets.max_num_seqs == 8  # the last value
    assert targets.reports == []
