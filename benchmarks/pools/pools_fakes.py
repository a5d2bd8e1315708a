"""Fake models with a fixed time and acceptance, to measure the code around them.

The target's text is a function of its length: token(n) = hash(seed, n). A draft is right at each position with
probability alpha, decided by a hash, so that every path through the pool has the same draft. Where it is wrong, the
right token is its alternative r with fixed probabilities, close to those of the embedded model with a noisy copy as draft.
"""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection

from paceline.core.request import SamplingParams
from paceline.drafting.proposer import PoolProposer
from paceline.drafting.scheduler import DraftLimits
from paceline.drafting.state import DraftBranch, DraftedToken
from paceline.drafting.worker import DraftWorker, DraftWorkerStatus
from paceline.model_files.tokenizer.compatibility import Fingerprint
from paceline.speculation.proposer import Proposer, SequenceProgress
from paceline.wire.draft_messages import TO_DRAFT_WORKER
from paceline.wire.keys import Security
from paceline.wire.transport import Listener

VOCAB = 49_152
TOKENIZER = Fingerprint("timed", "", "", "", None)
ALTERNATIVE_ODDS = (0.45, 0.17, 0.09, 0.05)
"""P(the target's token is alternative r | it is not the draft's token)."""


def mix(*parts: int) -> int:
    x = 0x9E3779B97F4A7C15
    for part in parts:
        x = ((x ^ part) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x ^= x >> 29
    return x


@lru_cache(maxsize=1 << 16)
def truth(seed: int, position: int) -> int:
    return mix(1, seed, position) % VOCAB


class TimedCore:
    """Sleeps `seconds` per pass, and `per_branch` more for each branch after the first. A branch that differs from the target's
    text drafts wrong tokens."""

    def __init__(
        self, alpha: float, seconds: float, odds: Sequence[float] = ALTERNATIVE_ODDS, per_branch: float = 0.0
    ) -> None:
        self._alpha, self._seconds, self._odds, self._per_branch = alpha, seconds, odds, per_branch
        self.num_passes = 0
        self._drawn: dict[tuple[int, int, bool], DraftedToken] = {}

    def step(self, branches: Sequence[DraftBranch]) -> list[DraftedToken | None]:
        started = time.perf_counter()
        drawn: list[DraftedToken | None] = [self._draw(branch) for branch in branches]
        self.num_passes += 1
        for branch in branches:
            branch.num_cached = len(branch.ids)
        rest = self._seconds + self._per_branch * (len(branches) - 1) - (time.perf_counter() - started)
        if rest > 0:
            time.sleep(rest)
        return drawn

    def fork(self, branch: DraftBranch, child: DraftBranch) -> None:
        child.num_cached = min(branch.num_cached, len(child.ids) - 1)

    def truncate(self, branch: DraftBranch, length: int) -> None:
        del branch.ids[length:]
        branch.num_cached = min(branch.num_cached, length)

    def close(self, branches: Sequence[DraftBranch]) -> None:
        pass

    def _draw(self, branch: DraftBranch) -> DraftedToken:
        seed, position = branch.params.seed, len(branch.ids)
        on_track = branch.ids[-1] == truth(seed, position - 1)
        drawn = self._drawn.get((seed, position, on_track))
        if drawn is None:
            if len(self._drawn) > 1 << 16:
                self._drawn.clear()
            drawn = self._drawn[seed, position, on_track] = self._guess(seed, position, on_track)
        return drawn

    def _guess(self, seed: int, position: int, on_track: bool) -> DraftedToken:
        """One hash decides the token: the cost of sampling is not measured."""
        h = mix(2, seed, position)
        right = truth(seed, position)
        alternatives = [(right + 1 + (h + i) % 1000) % VOCAB for i in range(1 + len(self._odds))]
        wrong = alternatives.pop()
        if on_track and (h >> 40) / 2**24 < self._alpha:
            return DraftedToken(right, tuple(alternatives))
        u = (h >> 16 & 0xFFFFFF) / 2**24
        for rank, odds in enumerate(self._odds):
            if on_track and u < odds:
                alternatives[rank] = right
                break
            u -= odds
        return DraftedToken(wrong, tuple(alternatives))


def serve(
    connection: Connection,
    alpha: float,
    seconds: float,
    limits: DraftLimits,
    security: Security | None,
    per_branch: float,
) -> None:
    """A draft worker with a timed core; it sends its address, and stops when the pipe closes."""
    listener = Listener("tcp://127.0.0.1:0", TO_DRAFT_WORKER, security)
    core = TimedCore(alpha, seconds, per_branch=per_branch)
    worker = DraftWorker("draft-0", core, listener, TOKENIZER, VOCAB, limits)
    connection.send(worker.address)
    threading.Thread(target=_until_closed, args=(connection, worker), daemon=True).start()
    worker.run()


def _until_closed(connection: Connection, worker: DraftWorker) -> None:
    with suppress(EOFError):
        while True:
            connection.recv()
            connection.send(worker.status())
    worker.stop()


@contextmanager
def worker_process(
    alpha: float, seconds: float, limits: DraftLimits, security: Security | None = None, per_branch: float = 0.0
) -> Iterator[tuple[str, Callable[[], DraftWorkerStatus]]]:
    """A draft worker in its own process: its address, and a function that returns its snapshot."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, alpha, seconds, limits, security, per_branch), daemon=True)
    process.start()
    there.close()

    def snapshot() -> DraftWorkerStatus:
        here.send(None)
        answer: DraftWorkerStatus = here.recv()
        return answer

    try:
        yield here.recv(), snapshot
    finally:
        here.close()
        process.join(10)


def until_up(proposer: PoolProposer, seconds: float = 10.0) -> None:
    until = time.perf_counter() + seconds
    while not proposer.connections[0].is_ready:
        if time.perf_counter() > until:
            raise SystemExit("the draft worker does not respond")
        proposer.observe([])
        time.sleep(0.005)


@dataclass(slots=True)
class Run:
    """Figures of some target steps."""

    seconds: float = 0.0
    tokens: int = 0
    overheads: list[float] = field(default_factory=list)
    """Seconds of each step outside verification."""
    pooled: list[float] = field(default_factory=list)
    """Seconds in `observe` and `collect`."""
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of this thread in `observe` and `collect`."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def decode(
    proposer: Proposer | None, batch: int, steps: int, depth: int, verify: float, first_seed: int = 0, warm: int = 10
) -> Run:
    """A target that takes `verify` seconds per step and accepts the tokens of its text."""
    texts = {i: [truth(first_seed + i, n) for n in range(32)] for i in range(batch)}
    result, patience = Run(), verify or 0.02
    for step in range(-warm, steps):
        started = time.perf_counter()
        drafts, pooled, cpu = {}, 0.0, 0.0
        if proposer is not None:
            progress = [_progress(i, ids, depth, first_seed + i) for i, ids in texts.items()]
            begun, cpu_begun = time.perf_counter(), time.thread_time()
            proposer.observe(progress)
            batch_drafts = proposer.collect(list(texts), time.perf_counter() + patience)
            pooled, cpu = time.perf_counter() - begun, time.thread_time() - cpu_begun
            drafts = batch_drafts.split()
        drafted = time.perf_counter()
        if verify:
            time.sleep(verify)
        count = 0
        for i, ids in texts.items():
            accepted = drafts[i].tokens if i in drafts else ()
            before = len(ids)
            for token in (*accepted, None):
                right = truth(first_seed + i, len(ids))
                ids.append(right)
                if token != right:
                    break
            count += len(ids) - before
        if step >= 0:
            ended = time.perf_counter()
            result.seconds += ended - started
            result.tokens += count
            result.overheads.append(drafted - started)
            result.pooled.append(pooled)
            result.cpu.append(cpu)
    if proposer is not None:
        proposer.close(list(texts))
    return result


_SAMPLING = SamplingParams()  # one per request in an engine


def _progress(number: int, ids: list[int], depth: int, seed: int) -> SequenceProgress:
    return SequenceProgress(number, ids, depth, _SAMPLING, seed, 0, 32, "coupled")
