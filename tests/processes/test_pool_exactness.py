"""Drafts from a pool: the text equals plain decoding, whatever the pool does."""

import itertools
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.clock import WallClock
from paceline.core.request import SamplingParams
from paceline.drafting.connection import DraftAddress
from paceline.drafting.proposer import PoolProposer
from paceline.drafting.scheduler import DraftLimits
from paceline.drafting.trial import PoolStatistics
from paceline.engine import host
from paceline.policy.pairing.ahead import TargetTokenRate
from paceline.speculation.proposers.suffix import NgramProposer
from paceline.wire.draft_messages import TO_DRAFT_WORKER, Branches, Drafts
from paceline.wire.transport import Listener
from tests.exactness.suite import check_distribution, check_identical, mixed_requests, plain_text
from tests.fakes import TINY, MixedDepth, draft_model, tiny_engine, tiny_model
from tests.processes.memory_link import MemoryListener
from tests.processes.pools import (
    TOKENIZER,
    PatientProposer,
    draft_worker,
    lockstep,
    model_core,
    never_lose_workers,
    pool,
    securities,
    wait_ready,
)
from tests.specs import changed

VOCAB = TINY.vocab_size
SMALL = changed(TINY, vocab_size=5)
DRAWS = 2_000


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.fixture(autouse=True)
def _workers_are_never_lost(monkeypatch):
    never_lose_workers(monkeypatch)


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("max_branch_tokens", [0, 32])
@pytest.mark.parametrize("perturb", [0.0, 0.3])
def test_text_equals_plain_decoding(target, perturb, max_branch_tokens, trees):
    core = model_core(tiny_model(perturb=perturb))
    with (
        draft_worker(core, VOCAB, DraftLimits(max_branch_tokens=max_branch_tokens)) as worker,
        pool(worker, vocab_size=VOCAB, trees=trees) as proposer,
    ):
        engine = tiny_engine(target, PatientProposer(proposer), depth=4, clock=WallClock())
        result = check_identical(target, engine, mixed_requests(8, VOCAB))
        counters = proposer.connections[0].counters
        assert counters.faults == 0
        assert result.drafted > 80
        assert (result.accepted == result.drafted) == (perturb == 0.0 and not trees)
        assert max_branch_tokens or not counters.ready


def test_text_does_not_depend_on_the_choice_between_pool_and_in_engine_draft(target):
    core = model_core(tiny_model(perturb=0.3))
    with draft_worker(core, VOCAB) as worker, pool(worker, vocab_size=VOCAB) as proposer:
        engine = tiny_engine(
            target, draft_model(tiny_model(perturb=0.1)), depth=4, clock=WallClock(),
            more_proposers={"pool": PatientProposer(proposer)}, default_methods=("pool", "fake"),
        )  # fmt: skip
        for seed in range(24):
            check_identical(target, engine, mixed_requests(4, VOCAB, seed, max_tokens=60))
        methods = {status.method for status in engine.speculator.traffic.report()}
        assert methods == {"pool", "fake"}
        assert proposer.connections[0].counters.faults == 0


def test_a_pool_is_available_while_a_worker_is_connected():
    with draft_worker(model_core(tiny_model()), VOCAB) as worker, pool(worker, vocab_size=VOCAB) as proposer:
        assert proposer.traits.is_available()
        proposer.set_workers(())
        assert not proposer.traits.is_available()


@pytest.mark.parametrize("sends_ahead", [False, True])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("perturb", [0.0, 0.1, 0.3])
def test_drafts_made_ahead_are_used_and_do_not_change_the_text(target, perturb, trees, sends_ahead, monkeypatch):
    monkeypatch.setattr(PoolStatistics, "wants_branches", lambda self, connection: sends_ahead)
    core = model_core(tiny_model(perturb=perturb))
    with lockstep(core, VOCAB, DraftLimits(max_branch_tokens=16), trees) as (proposer, worker):
        engine = tiny_engine(target, proposer, depth=4, clock=proposer.clock)
        result = check_identical(target, engine, mixed_requests(8, VOCAB))
        if perturb == 0.0 and not trees:
            assert result.accepted == result.drafted, "a branch must see its own text only"
        counters, status = proposer.inner.connections[0].counters, worker.status()
        assert counters.faults == counters.late == 0
        assert status.ready_rounds > 0.1 * status.rounds
        while worker.status().sequences:
            worker.run_once(1.0)
        assert core.num_free_blocks == 128


def test_alternatives_are_accepted(target, monkeypatch):
    """Of drafts with as many nodes, those with alternatives have more accepted tokens if the draft is often wrong."""
    monkeypatch.setattr(TargetTokenRate, "is_worth_waiting", lambda self, survival, seconds: True)  # no draft is cut
    accepted = {}
    for trees in (False, True):
        core = model_core(tiny_model(perturb=0.3))
        with lockstep(core, VOCAB, DraftLimits(max_branch_tokens=16), trees) as (proposer, _):
            engine = tiny_engine(target, proposer, depth=8, clock=proposer.clock)
            result = check_identical(target, engine, mixed_requests(9, VOCAB, seed=11, max_tokens=40))
            accepted[trees] = result.accepted / result.drafted
    assert accepted[True] > 1.1 * accepted[False]


@pytest.mark.parametrize("bug", ["path_moves", "span_of"])
def test_planted_bugs_of_trees_are_caught(target, bug, monkeypatch):
    """The cache of an accepted path is not moved; nodes attend to other paths."""
    span_of = host.span_of
    bugs = {
        "path_moves": lambda *given: ([], []),
        "span_of": lambda *given: replace(span_of(*given), ancestors=None),
    }
    monkeypatch.setattr(host, bug, bugs[bug])
    with lockstep(model_core(tiny_model(perturb=0.3)), VOCAB, trees=True) as (proposer, _):
        engine = tiny_engine(target, proposer, depth=8, clock=proposer.clock)
        with pytest.raises(AssertionError):
            check_identical(target, engine, mixed_requests(8, VOCAB, seed=11, max_tokens=40))


@pytest.mark.parametrize(
    ("ahead", "trees"), [(False, False), (True, True), pytest.param(True, False, marks=pytest.mark.slow)]
)
def test_rejection_is_exact(ahead, trees, monkeypatch):
    target, draft = (tiny_model(config=SMALL, perturb=perturb, scale=1.2) for perturb in (0.0, 0.5))
    monkeypatch.setattr(PoolStatistics, "wants_branches", lambda self, connection: ahead)
    limits = DraftLimits(max_sequences=1024, max_batch=4096, max_branch_tokens=6)
    core = model_core(draft, 16384, 16384)
    with lockstep(core, 5, limits, trees) as (proposer, worker):
        clock = proposer.clock

        def engine():
            return tiny_engine(
                target, proposer, 3, max_num_seqs=512, max_batched_tokens=8192, kv_tokens=16 * 1024, clock=clock
            )

        check_distribution(target, engine, (1, 3), SamplingParams(temperature=1.5), DRAWS, length=3, extra=2)
        status = worker.status()
        assert status.ready_rounds > 0.1 * status.rounds


def test_two_encrypted_workers_with_changing_depths(target):
    server, client = securities()
    core = [model_core(tiny_model(perturb=perturb)) for perturb in (0.1, 0.3)]
    with (
        draft_worker(core[0], VOCAB, security=server, name="a") as one,
        draft_worker(core[1], VOCAB, security=server, name="b") as two,
        pool(*(DraftAddress(w.name, w.address, client) for w in (one, two)), vocab_size=VOCAB, trees=True) as proposer,
    ):
        engine = tiny_engine(target, PatientProposer(proposer), MixedDepth(6), kv_tokens=16 * 16, clock=WallClock())
        result = check_identical(target, engine, mixed_requests(10, VOCAB, seed=2, max_tokens=60))
        assert result.accepted > 0


def test_worker_with_little_room_changes_speed_only(target):
    limits = DraftLimits(max_sequences=3, max_tokens=120)
    with (
        draft_worker(model_core(tiny_model(), num_blocks=9, max_rows=8), VOCAB, limits) as worker,
        pool(worker, vocab_size=VOCAB, fallback=NgramProposer(), trees=True) as proposer,
    ):
        engine = tiny_engine(target, PatientProposer(proposer, 0.5), depth=4, clock=WallClock())
        result = check_identical(target, engine, mixed_requests(8, VOCAB, seed=4))
        assert result.accepted > 0
        assert proposer.connections[0].counters.busy > 0


class FaultyListener(MemoryListener):
    """Sends wrong answers, of another kind each time."""

    kinds = itertools.cycle(range(6))

    def send(self, peer, message):
        if isinstance(message, Drafts):
            kind = next(self.kinds)
            change = {
                0: lambda d: replace_struct(d, tokens=[VOCAB + 5] * len(d.tokens)),
                1: lambda d: replace_struct(d, tokens=[1] * 60),
                2: lambda d: replace_struct(d, round=d.round + 1),
                3: lambda d: replace_struct(d, tokens=[0] * len(d.tokens)),
                4: lambda d: replace_struct(d, alternatives=[0, VOCAB, 0]),
                5: lambda d: replace_struct(d, alternatives=[0, 1] * 64),
            }[kind]
            message = Drafts(message.epoch, [change(d) for d in message.drafts])
        elif isinstance(message, Branches):
            message = Branches(message.epoch + 1, message.sequences)
        return super().send(peer, message)


def replace_struct(struct, **changes):
    return type(struct)(**{f: changes.get(f, getattr(struct, f)) for f in struct.__struct_fields__})


def test_worker_with_wrong_answers_is_not_used_any_more(target, monkeypatch):
    monkeypatch.setattr("tests.processes.pools.MemoryListener", FaultyListener)
    with lockstep(model_core(tiny_model()), VOCAB, trees=True) as (proposer, _):
        engine = tiny_engine(target, proposer, depth=4, clock=proposer.clock)
        check_identical(target, engine, mixed_requests(8, VOCAB))
        counters = proposer.inner.connections[0].counters
        assert counters.faults >= 3
        assert counters.losses >= 1


class FailingProposer:
    """Causes a failure once, during the run."""

    def __init__(self, inner, cause_failure, after=6):
        self.inner, self._cause_failure, self._left = inner, cause_failure, after
        self.traits = inner.traits

    def observe(self, batch):
        self._left -= 1
        if self._left == 0:
            self._cause_failure()
        self.inner.observe(batch)

    def collect(self, sequence_ids, deadline):
        return self.inner.collect(sequence_ids, deadline)

    def close(self, sequence_ids):
        self.inner.close(sequence_ids)


@contextmanager
def process():
    with subprocess.Popen(
        [sys.executable, "-m", "tests.processes.draft_process", "0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        try:
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_worker_process_is_killed_or_hangs_during_the_run(target, how, monkeypatch):
    """Another worker takes its sequences, and the text is the same. A worker that continues is used again."""

    def cause_failure():
        monkeypatch.setattr("paceline.drafting.connection.HUNG_SECONDS", 1.0)
        child.send_signal(how)
        if how == signal.SIGKILL:
            child.wait()

    requests = mixed_requests(8, VOCAB, seed=3, max_tokens=40)
    with (
        process() as (child, address),
        draft_worker(model_core(tiny_model()), VOCAB, name="z") as other,
        pool(DraftAddress("a", address), other, vocab_size=VOCAB) as proposer,
    ):
        prefer(proposer, "a")
        engine = tiny_engine(
            target,
            FailingProposer(PatientProposer(proposer, 0.5), cause_failure),
            depth=3,
            clock=WallClock(),
        )
        result = check_identical(target, engine, requests)
        first, second = (connection.counters for connection in proposer.connections)
        assert first.rounds > 0
        assert first.losses >= 1
        assert second.rounds > 0, "its sequences were opened at the other worker"
        assert result.accepted > 0
        if how == signal.SIGSTOP:
            child.send_signal(signal.SIGCONT)
            wait_ready(proposer, 2)


def prefer(proposer, name):
    """Both workers are on this machine; the test needs a certain one."""
    proposer._pool_drafts.current.pairing._current = name


def test_restarted_worker_is_used_again(target):
    requests = mixed_requests(6, VOCAB, seed=5)
    with draft_worker(model_core(tiny_model()), VOCAB) as worker:
        where = DraftAddress(worker.name, worker.address)
        proposer = PoolProposer([where], TOKENIZER, VOCAB)
        wait_ready(proposer, 1)
    engine = tiny_engine(target, PatientProposer(proposer, 0.2), depth=3, clock=WallClock())
    check_identical(target, engine, requests[:2])
    before = proposer.connections[0].epoch
    with draft_worker(model_core(tiny_model()), VOCAB, address=where.address):
        until_epoch_changes(proposer, before)
        engine = tiny_engine(target, PatientProposer(proposer), depth=3, clock=WallClock())
        assert check_identical(target, engine, requests[2:]).accepted > 0
    proposer.shut_down()


def until_epoch_changes(proposer, before):
    for _ in range(5000):
        connection = proposer.connections[0]
        if connection.is_ready and connection.epoch != before:
            return
        proposer.observe([])
        connection.transport.wait(0.01)
    raise AssertionError(proposer.status())


def test_without_a_worker_the_fallback_drafts(target):
    listener = Listener("tcp://127.0.0.1:0", TO_DRAFT_WORKER)
    listener.close()
    with pool(DraftAddress("a", listener.address), vocab_size=VOCAB, fallback=NgramProposer(), ready=0) as proposer:
        engine = tiny_engine(target, PatientProposer(proposer), depth=4, clock=WallClock())
        assert check_identical(target, engine, mixed_requests(4, VOCAB)).drafted > 0


def test_worker_with_another_vocabulary_is_not_used(target):
    with (
        draft_worker(model_core(tiny_model()), VOCAB, tokenizer=replace(TOKENIZER, vocabulary="another")) as worker,
        pool(worker, vocab_size=VOCAB, ready=0) as proposer,
    ):
        engine = tiny_engine(target, PatientProposer(proposer, 0.1), depth=4, clock=WallClock())
        assert check_identical(target, engine, mixed_requests(4, VOCAB)).drafted == 0
        assert not proposer.connections[0].is_ready


def test_greedy_text_under_rejection_equals_plain_decoding(target):
    requests = [r for r in mixed_requests(12, VOCAB, seed=8, verification="rejection") if r.sampling.is_greedy]
    with draft_worker(model_core(tiny_model(perturb=0.1)), VOCAB) as worker, pool(worker, vocab_size=VOCAB) as proposer:
        engine = tiny_engine(target, PatientProposer(proposer), depth=4, clock=WallClock())
        assert check_identical(target, engine, requests).accepted > 0
    assert plain_text(target, requests)


def test_text_is_the_same_over_a_slow_network(target, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "pools"))
    import pools_delay

    core = model_core(tiny_model(perturb=0.1))
    with (
        draft_worker(core, VOCAB) as worker,
        pools_delay.delayed(worker.address, 0.010) as far,
        pool(DraftAddress("far", far), vocab_size=VOCAB) as proposer,
    ):
        engine = tiny_engine(target, PatientProposer(proposer), depth=4, clock=WallClock())
        result = check_identical(target, engine, mixed_requests(8, VOCAB, seed=9))
        assert result.accepted > 0
        trip = proposer.connections[0].round_trip.measured
        assert trip is not None
        assert trip >= 0.010
