"""A small part of benchmarks/pools/pools_fuzz.py: the worker stays up, serves a valid target, and leaks nothing."""

import random
import sys
from contextlib import closing
from pathlib import Path

import pytest

from paceline.drafting.connection import DraftAddress
from paceline.wire.draft_messages import TO_TARGET, VERSION, Goodbye, Hello
from paceline.wire.transport import Connection
from tests.processes.pools import TOKENIZER, PatientProposer, draft_worker, never_lose_workers, pool, securities

MESSAGES = 20_000


@pytest.fixture
def fuzz(monkeypatch):
    never_lose_workers(monkeypatch)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "pools"))
    import pools_fakes
    import pools_fuzz

    monkeypatch.setattr(pools_fuzz, "TOKENIZER", TOKENIZER)
    yield pools_fuzz, pools_fakes
    for name in ("pools_fakes", "pools_fuzz"):
        del sys.modules[name]


def test_twenty_thousand_messages_and_a_hundred_connections(fuzz):
    pools_fuzz, fakes = fuzz
    server, client = securities()
    with draft_worker(fakes.TimedCore(0.8, 0.0), fakes.VOCAB, security=server) as worker:
        where = DraftAddress(worker.name, worker.address, client)
        with (
            pool(where, vocab_size=fakes.VOCAB) as good,
            closing(Connection(worker.address, TO_TARGET, client)) as line,
        ):
            hello = Hello(VERSION, 1, TOKENIZER, "fuzzer")
            fuzzer = pools_fuzz.Fuzzer(0, worker.epoch)
            for part in range(4):
                line.send(hello)
                pools_fuzz.shoot(line, fuzzer, MESSAGES // 4)
                pools_fuzz.knock(worker.address, 25, random.Random(part))
                run = fakes.decode(PatientProposer(good), batch=2, steps=10, depth=4, verify=0.03, first_seed=part)
                assert run.tokens > 2 * 10, "the valid target still gets drafts"
            seen = worker.status()
            assert 0.3 * MESSAGES < seen.malformed < 0.7 * MESSAGES
            assert good.connections[0].counters.faults == 0
            line.send(hello)
            line.send(Goodbye())
            fakes.decode(good, batch=1, steps=3, depth=2, verify=0.001)
    assert worker.status().sequences == 0
