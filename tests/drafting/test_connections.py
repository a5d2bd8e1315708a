"""The connections of a pool: which workers they are to, kept and closed."""

import pytest

from paceline.drafting.connection import DraftAddress
from tests.drafting.fakes import progress
from tests.processes.pools import ScriptedCore, lockstep

VOCAB = 1000


def test_set_workers_closes_the_connections_to_the_others() -> None:
    with lockstep(ScriptedCore(lambda ids: ids[-1] + 1), VOCAB) as (proposer, worker):
        pool = proposer.inner
        proposer.observe([progress(7, 1, 2)])
        kept = pool.connections[0]
        assert pool.status().drafters[0].sequences == 1
        pool.set_workers([DraftAddress("draft-0", worker.address), DraftAddress("draft-1", "tcp://127.0.0.1:9")])
        assert pool.connections[0] is kept
        assert pool.status().drafters[0].sequences == 1
        pool.set_workers([])
        assert pool.connections == ()
        worker.run_once(0.0)
        assert worker.status().peers == 0, "it received a goodbye"
        pool.observe([progress(7, 1, 2, 3)])
        assert len(pool.collect([7], 0.0).tokens) == 0


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://:::", "http://127.0.0.1:1", "tcp://\0"])
def test_worker_with_an_invalid_address_is_ignored(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with lockstep(ScriptedCore(lambda ids: ids[-1] + 1), VOCAB) as (proposer, worker):
        pool = proposer.inner
        pool.set_workers([DraftAddress("bad", address), DraftAddress("draft-0", worker.address)])
        assert [one.where.name for one in pool.connections] == ["draft-0"]
        assert "is ignored" in caplog.text
