"""Draft workers on threads of the test process, and the proposer that talks to them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from paceline.core.clock import Clock, WallClock
from paceline.models.architectures.llama import DecoderModel
from paceline.models.runner import ModelRunner
from paceline.runtime.draft_pool.connection import DraftAddress
from paceline.runtime.draft_pool.proposer import PoolProposer
from paceline.runtime.draft_worker.core import DraftCore, Drawn, Ride
from paceline.runtime.draft_worker.model_core import ModelCore
from paceline.runtime.draft_worker.scheduler import DraftLimits
from paceline.runtime.draft_worker.worker import DraftWorker
from paceline.runtime.wire.keys import Security, generate
from paceline.runtime.wire.messages import TO_DRAFT_WORKER
from paceline.runtime.wire.transport import Listener
from paceline.speculation.drafts import DraftBatch
from paceline.speculation.proposer import Progress, Proposer

VOCABULARY = "sum of the tiny vocabulary"


def model_core(model: DecoderModel, num_blocks: int = 128, max_rows: int = 64) -> ModelCore:
    size = model.config.vocab_size
    return ModelCore(ModelRunner(model, num_blocks), max_rows, size, size)


@contextmanager
def draft_worker(
    core: DraftCore,
    vocab_size: int,
    limits: DraftLimits | None = None,
    security: Security | None = None,
    name: str = "draft-0",
    address: str = "tcp://127.0.0.1:0",
    vocabulary: str = VOCABULARY,
) -> Iterator[DraftWorker]:
    worker = DraftWorker(name, core, Listener(address, TO_DRAFT_WORKER, security), vocabulary, vocab_size, limits)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(10)
        assert not thread.is_alive()


class Patient:
    """Waits for drafts as long as it takes: how fast the machine is must not decide what a test sees."""

    def __init__(self, inner: Proposer, seconds: float = 5.0) -> None:
        self.inner, self._seconds = inner, seconds

    def observe(self, batch: Sequence[Progress]) -> None:
        self.inner.observe(batch)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        return self.inner.collect(sequence_ids, WallClock().now() + self._seconds)

    def close(self, sequence_ids: Sequence[int]) -> None:
        self.inner.close(sequence_ids)


@contextmanager
def pool(
    *workers: DraftWorker | DraftAddress,
    vocab_size: int,
    vocabulary: str = VOCABULARY,
    fallback: Proposer | None = None,
    clock: Clock | None = None,
    ready: int | None = None,
) -> Iterator[PoolProposer]:
    """A proposer whose lines are up, `ready` of them at the least (all, unless told)."""
    addresses = [
        worker if isinstance(worker, DraftAddress) else DraftAddress(worker.name, worker.address) for worker in workers
    ]
    proposer = PoolProposer(addresses, vocabulary, vocab_size, "target-0", fallback, clock)
    try:
        wait_up(proposer, len(addresses) if ready is None else ready)
        yield proposer
    finally:
        proposer.shut_down()


def wait_up(proposer: PoolProposer, count: int, seconds: float = 10.0) -> None:
    """Until `count` lines are up."""
    until = time.monotonic() + seconds
    while sum(link.state.value == "up" for link in proposer.snapshot().links) < count:
        assert time.monotonic() < until, proposer.snapshot()
        proposer.observe([])
        time.sleep(0.002)


def securities() -> tuple[Security, Security]:
    """A server's and a client's, each knowing the other."""
    server, client = generate(), generate()
    return Security(server, allowed=frozenset([client.public])), Security(client, server=server.public)


class Lockstep:
    """Target and draft worker take turns on one thread: the worker drafts all it can before the target goes on, ahead too.
    What is ready when is then the same in every run."""

    def __init__(self, inner: PoolProposer, worker: DraftWorker) -> None:
        self.inner, self._worker = inner, worker

    def observe(self, batch: Sequence[Progress]) -> None:
        self.inner.observe(batch)
        asked = sum(link.counts.rounds for link in self.inner.snapshot().links)
        until = time.monotonic() + 10.0
        more = True
        while more or self._worker.snapshot().rounds < asked:
            more = self._worker.turn(0.0 if more else 0.05)
            assert time.monotonic() < until, "the worker never heard of it"

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        return self.inner.collect(sequence_ids, WallClock().now() + 5.0)

    def close(self, sequence_ids: Sequence[int]) -> None:
        self.inner.close(sequence_ids)


@contextmanager
def lockstep(
    core: DraftCore, vocab_size: int, limits: DraftLimits | None = None
) -> Iterator[tuple[Lockstep, DraftWorker]]:
    listener = Listener("tcp://127.0.0.1:0", TO_DRAFT_WORKER)
    worker = DraftWorker("draft-0", core, listener, VOCABULARY, vocab_size, limits)
    proposer = PoolProposer([DraftAddress(worker.name, worker.address)], VOCABULARY, vocab_size)
    try:
        until = time.monotonic() + 10.0
        while proposer.snapshot().links[0].state.value != "up":
            assert time.monotonic() < until
            worker.turn(0.01)
            proposer.observe([])
        yield Lockstep(proposer, worker), worker
    finally:
        proposer.shut_down()
        worker.stop()
        worker.run()


class ScriptedCore:
    """Drafts by a rule: the token after `ids` is `rule(ids)`, its rivals the numbers above it. Counts what it is asked."""

    def __init__(self, rule: Callable[[Sequence[int]], int]) -> None:
        self._rule = rule
        self.steps: list[list[int]] = []
        """Ids of the rides of every pass."""
        self.open: set[int] = set()

    def step(self, rides: Sequence[Ride]) -> list[Drawn | None]:
        self.steps.append([ride.id for ride in rides])
        self.open.update(ride.id for ride in rides)
        return [Drawn(token := self._rule(ride.ids), (token + 1, token + 2, token + 3)) for ride in rides]

    def fork(self, ride: Ride, child: Ride) -> None:
        self.open.add(child.id)

    def cut(self, ride: Ride, length: int) -> None:
        del ride.ids[length:]

    def close(self, rides: Sequence[Ride]) -> None:
        self.open.difference_update(ride.id for ride in rides)
