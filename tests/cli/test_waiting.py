"""What `scale`, `apply`, `rollout`, `up` and `draft swap` show while they wait."""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from paceline.cli import cluster, console, live
from paceline.core.cluster_config import cluster_config
from paceline.core.status import WorkerLife, WorkerStatus
from paceline.policy.scaling.changes import resized
from paceline.policy.scaling.desired import DesiredState

POOL = {"name": "target", "role": "target", "model": "m"}
READY = WorkerStatus("target-0", "target", "target", "ready", "", round_trip=0.001)
JOINING = replace(READY, name="target-1", state="joining")
LOADING = [replace(JOINING, state=f"loading {layers}/30 layers from disk") for layers in (3, 12)]
FAILED = replace(JOINING, life=WorkerLife(2, None, "status 1 (no such model)"))
STEPS = [
    (READY,),
    (READY, JOINING),
    *((READY, worker) for worker in LOADING),
    (READY, FAILED),
    (READY, replace(JOINING, state="ready")),
]


class Gateway:
    """A gateway that sees the workers of the next step at each call, and those of the last step from then on."""

    def __init__(self, *steps: Sequence[WorkerStatus]) -> None:
        self._steps = list(steps)

    def workers(self) -> Sequence[WorkerStatus]:
        return self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POLL", 0.0)


@pytest.fixture(params=[False, True], ids=["pipe", "terminal"])
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Standard error of the commands."""
    text = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=text, width=100, force_terminal=request.param, highlight=False))
    return text


def wait(count: int, *steps: Sequence[WorkerStatus]) -> bool:
    state = resized(DesiredState.of(cluster_config({"pools": [POOL]})), "target", count)
    pools: Any = SimpleNamespace(desired=lambda: state)
    return live.wait_until_settled(cast(Any, Gateway(*steps)), pools, 60.0)


def test_the_state_of_each_missing_worker_is_shown(shown: io.StringIO) -> None:
    assert wait(2, *STEPS)
    if not console.err.is_terminal:
        assert shown.getvalue().splitlines() == [
            "target-1 starts",
            "target-1 joining",
            "target-1 loading 3/30 layers from disk",
            "target-1 joining (restarted 2x, last exit: status 1 (no such model))",
        ]


def test_workers_that_leave_are_shown(shown: io.StringIO) -> None:
    draining = replace(JOINING, state="draining")
    assert wait(1, (READY, draining), (READY, replace(JOINING, state="gone")))
    if not console.err.is_terminal:
        assert shown.getvalue() == "target-1 leaves: draining\n"


def test_a_terminal_has_one_line_with_the_time(shown: io.StringIO) -> None:
    with console.waiting("the new draft loads") as show:
        show("waiting for traffic: 3 sequences against 0")
    if console.err.is_terminal:
        assert re.search(r"waiting for traffic: 3 sequences against 0 *\S*0:00:00", shown.getvalue())
    else:
        assert shown.getvalue() == "waiting for traffic: 3 sequences against 0\n"


def test_up_shows_the_workers_that_are_not_ready() -> None:
    texts: list[str] = []
    measured = replace(READY, name="target-1", round_trip=None)
    steps = [(READY, JOINING), (READY, measured), (READY, replace(measured, round_trip=0.001))]
    assert cluster.all_ready(cast(Any, Gateway(*steps)), 60.0, texts.append)
    assert texts == ["target-1 joining", "measuring round trips"]
