"""Draft workers on threads of the test process, and pool proposers that use them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from paceline.core.clock import Clock, VirtualClock, WallClock
from paceline.drafting import connection
from paceline.drafting.connection import DraftAddress
from paceline.drafting.model import ModelDraftBackend
from paceline.drafting.proposer import PoolProposer
from paceline.drafting.scheduler import DraftLimits
from paceline.drafting.state import DraftBackend, DraftBranch, DraftedToken
from paceline.drafting.worker import DraftWorker
from paceline.model_files.tokenizer.compatibility import Fingerprint
from paceline.models.decoder.forward import DecoderModel
from paceline.models.runner.runner import ModelRunner
from paceline.speculation.drafts.drafts import DraftBatch
from paceline.speculation.proposer import Proposer, SequenceProgress
from paceline.wire.draft_messages import TO_DRAFT_WORKER
from paceline.wire.keys import Security, generate_key_pair
from paceline.wire.transport import Listener
from tests.processes.memory_link import MemoryListener, connections_in_memory

TOKENIZER = Fingerprint("vocabulary", "merges", "special", "stop", "template")
"""Checksums that stand for the tiny tokenizer."""


def model_core(model: DecoderModel, num_blocks: int = 128, max_rows: int = 64) -> ModelDraftBackend:
    size = model.config.vocab_size
    return ModelDraftBackend(ModelRunner(model, num_blocks), max_rows, size, size)


@contextmanager
def draft_worker(
    core: DraftBackend,
    vocab_size: int,
    limits: DraftLimits | None = None,
    security: Security | None = None,
    name: str = "draft-0",
    address: str = "tcp://127.0.0.1:0",
    tokenizer: Fingerprint = TOKENIZER,
) -> Iterator[DraftWorker]:
    worker = DraftWorker(name, core, Listener(address, TO_DRAFT_WORKER, security), tokenizer, vocab_size, limits)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(10)
        assert not thread.is_alive()


class PatientProposer:
    """Waits for drafts without a deadline, so that results do not depend on the speed of the machine."""

    def __init__(self, inner: Proposer, seconds: float = 5.0) -> None:
        self.inner, self._seconds = inner, seconds
        self.traits = inner.traits

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        self.inner.observe(batch)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        return self.inner.collect(sequence_ids, WallClock().now() + self._seconds)

    def close(self, sequence_ids: Sequence[int]) -> None:
        self.inner.close(sequence_ids)


@contextmanager
def pool(
    *workers: DraftWorker | DraftAddress,
    vocab_size: int,
    tokenizer: Fingerprint = TOKENIZER,
    fallback: Proposer | None = None,
    clock: Clock | None = None,
    ready: int | None = None,
    trees: bool = False,
) -> Iterator[PoolProposer]:
    """A proposer with at least `ready` connections that are ready; None: all of them."""
    addresses = [
        worker if isinstance(worker, DraftAddress) else DraftAddress(worker.name, worker.address) for worker in workers
    ]
    proposer = PoolProposer(addresses, tokenizer, vocab_size, "target-0", fallback, clock, trees)
    try:
        wait_ready(proposer, len(addresses) if ready is None else ready)
        yield proposer
    finally:
        proposer.shut_down()


def wait_ready(proposer: PoolProposer, count: int, seconds: float = 10.0) -> None:
    """Wait until `count` connections are ready."""
    until = time.monotonic() + seconds
    while sum(connection.is_ready for connection in proposer.connections) < count:
        assert time.monotonic() < until, proposer.status()
        proposer.observe([])
        time.sleep(0.002)


def never_lose_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft worker is lost or silent because the machine has no time for its thread."""
    monkeypatch.setattr(connection, "HUNG_SECONDS", 600.0)
    monkeypatch.setattr(connection, "SILENT_SECONDS", 600.0)


def securities() -> tuple[Security, Security]:
    """Keys of a server and of a client that it allows."""
    server, client = generate_key_pair(), generate_key_pair()
    return Security(server, allowed=frozenset([client.public])), Security(client, server=server.public)


STEP_SECONDS, PASS_SECONDS = 0.020, 0.001
"""Virtual time of a target's step and of a draft worker's pass."""


class TimedCore:
    """A backend whose passes take `PASS_SECONDS` of a virtual clock."""

    def __init__(self, inner: DraftBackend, clock: VirtualClock) -> None:
        self._inner, self._clock = inner, clock
        self.fork, self.truncate, self.close = inner.fork, inner.truncate, inner.close

    def step(self, branches: Sequence[DraftBranch]) -> Sequence[DraftedToken | None]:
        drafted = self._inner.step(branches)
        self._clock.advance(PASS_SECONDS)
        return drafted


class Lockstep:
    """Runs target and draft worker on one thread. The worker drafts all it can, also ahead, before the target continues.
    Messages arrive at once and time is virtual, so that every run is the same."""

    def __init__(self, inner: PoolProposer, worker: DraftWorker, clock: VirtualClock) -> None:
        self.inner, self.clock, self._worker = inner, clock, worker
        self.traits = inner.traits

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        self.clock.advance(STEP_SECONDS)
        self.inner.observe(batch)
        while self._worker.run_once(0.0):
            pass

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        return self.inner.collect(sequence_ids, self.clock.now() + 5.0)

    def close(self, sequence_ids: Sequence[int]) -> None:
        self.inner.close(sequence_ids)


@contextmanager
def lockstep(
    core: DraftBackend,
    vocab_size: int,
    limits: DraftLimits | None = None,
    trees: bool = False,
) -> Iterator[tuple[Lockstep, DraftWorker]]:
    clock, listener = VirtualClock(), MemoryListener()
    worker = DraftWorker("draft-0", TimedCore(core, clock), listener, TOKENIZER, vocab_size, limits, clock)
    address = DraftAddress(worker.name, worker.address)
    with connections_in_memory(listener, clock):
        proposer = PoolProposer([address], TOKENIZER, vocab_size, clock=clock, verifies_trees=trees)
        try:
            worker.run_once(0.0)  # it answers the handshake
            proposer.observe([])
            assert proposer.connections[0].is_ready
            yield Lockstep(proposer, worker, clock), worker
        finally:
            proposer.shut_down()
            worker.stop()
            worker.run()


class ScriptedCore:
    """Drafts by a rule: the token after `ids` is `rule(ids)`, its alternatives are the next numbers."""

    def __init__(self, rule: Callable[[Sequence[int]], int]) -> None:
        self._rule = rule
        self.steps: list[list[int]] = []
        """Branch ids of every pass."""
        self.open: set[int] = set()
        """Ids of open branches."""

    def step(self, branches: Sequence[DraftBranch]) -> list[DraftedToken | None]:
        self.steps.append([branch.id for branch in branches])
        self.open.update(branch.id for branch in branches)
        return [DraftedToken(token := self._rule(branch.ids), (token + 1, token + 2, token + 3)) for branch in branches]

    def fork(self, branch: DraftBranch, child: DraftBranch) -> None:
        self.open.add(child.id)

    def truncate(self, branch: DraftBranch, length: int) -> None:
        del branch.ids[length:]

    def close(self, branches: Sequence[DraftBranch]) -> None:
        self.open.difference_update(branch.id for branch in branches)
