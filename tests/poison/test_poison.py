"""A server process with real parts is attacked while it streams: no stream is lost or different, and no engine dies.

`make test` sends every kind once beside three streams; `make test-poison` attacks 16 streams of one engine, and of a cluster,
and checks the times too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import pytest

from tests.gateway.process import Process
from tests.poison.attack import Run, cluster_server, engine_pids, engine_server, report, run_streams
from tests.poison.kinds import BODIES, KINDS

REFUSED = {400, 408, 413, 429}


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with engine_server() as process:
        yield process


@pytest.fixture(scope="module", params=[engine_server, cluster_server])
def either_server(request: pytest.FixtureRequest) -> Iterator[Process]:
    start: Callable[[], AbstractContextManager[Process]] = request.param
    with start() as process:
        yield process


def attack(
    server: Process, streams: int, tokens: int, rounds: int, seed: int, kinds: Sequence[str] = tuple(KINDS)
) -> tuple[Run, Run]:
    """The runs without and with poison, checked for everything but times."""
    run_streams(server.url, streams, 8)  # warm
    before = engine_pids(server.popen.pid)
    plain = run_streams(server.url, streams, tokens)
    attacked = run_streams(server.url, streams, tokens, kinds, seed, rounds)
    assert attacked.num_lost == 0
    assert attacked.num_different(plain) == 0
    assert engine_pids(server.popen.pid) == before
    for name, statuses in attacked.statuses.items():
        assert set(statuses) <= REFUSED | {200}, f"{name}: {dict(statuses)}"
    assert set(attacked.statuses) == set(kinds)
    return plain, attacked


def test_streams_survive_every_kind_of_poison(server: Process) -> None:
    attack(server, streams=3, tokens=24, rounds=1, seed=1)


@pytest.mark.poison
def test_streams_are_not_delayed(either_server: Process) -> None:
    plain, attacked = attack(either_server, streams=16, tokens=192, rounds=3, seed=2)
    print("\n".join(report(plain, attacked)))
    assert attacked.longest_gap <= plain.longest_gap + 0.5
    assert attacked.health_p99 <= 0.05


@pytest.mark.poison
def test_large_bodies_delay_nothing(either_server: Process) -> None:
    plain, attacked = attack(either_server, streams=16, tokens=192, rounds=16, seed=3, kinds=BODIES)
    print("\n".join(report(plain, attacked)))
    assert attacked.longest_gap <= plain.longest_gap + 0.2
    assert attacked.health_p99 <= 0.05
