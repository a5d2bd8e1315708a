"""A draft worker: drafts for many targets with one thread, one socket and one batch.

Each iteration receives all messages, answers complete rounds, and runs one pass of the backend. The pass takes the branches
that targets wait for, round-robin over targets, then branches drafted ahead. A round that is drafted on demand starts with the
next pass, and a target with many sequences does not delay the remaining targets.
"""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.clock import Clock, WallClock
from paceline.models.drafts.compatibility import Fingerprint
from paceline.runtime.draft_worker.core import DraftBackend, DraftBranch, DraftedToken
from paceline.runtime.draft_worker.inbox import TargetInbox
from paceline.runtime.draft_worker.pass_times import DraftPassTimes
from paceline.runtime.draft_worker.scheduler import DraftLimits, DraftScheduler
from paceline.runtime.draft_worker.sender import DraftSender
from paceline.runtime.weights.manager import WeightManager
from paceline.runtime.wire.messages import ErrorCode, FromTarget, Goodbye
from paceline.runtime.wire.transport import Listener

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftWorkerStatus:
    name: str
    epoch: int
    peers: int
    sequences: int
    waiting: int
    pass_seconds: float
    rounds: int
    ready_rounds: int
    """Rounds whose draft was complete when it was requested."""
    alphas: tuple[float, ...]
    malformed: int
    rejected: int
    """Connection attempts with a key that is not allowed."""
    paused: int
    """Targets for which drafting ahead is paused."""


class DraftWorker:
    """Listens from its construction on; `run` serves until `stop`, which any thread may call. No message ends it."""

    def __init__(
        self,
        name: str,
        backend: DraftBackend,
        listener: Listener[FromTarget],
        tokenizer: Fingerprint,
        vocab_size: int,
        limits: DraftLimits | None = None,
        clock: Clock | None = None,
        weights: WeightManager | None = None,
    ) -> None:
        """`tokenizer` is that of the draft. The worker refuses targets whose tokenizer or chat template differs. `weights` is
        closed at the end."""
        self.name = name
        self.epoch = secrets.randbits(32)  # part of every message: five bytes instead of nine
        limits, self._clock = limits or DraftLimits(), clock or WallClock()
        self._backend, self._listener, self._weights = backend, listener, weights
        self._scheduler = DraftScheduler(backend, vocab_size, limits)
        self._times = DraftPassTimes()
        self._sender = DraftSender(self.epoch, listener, self._scheduler, self._times, limits, self._clock)
        self._inbox = TargetInbox(
            name, self.epoch, tokenizer, listener, self._scheduler, self._sender, self._times, limits, self._clock
        )
        self._is_stopping = False
        self._drain_seconds: float | None = None
        """Seconds that the drain may take. None if the worker does not drain."""

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def weight_address(self) -> str:
        """Address of its weight server. Empty without a weight server."""
        return "" if self._weights is None else self._weights.address

    @property
    def is_loading(self) -> bool:
        return self._weights is not None and self._weights.progress is not None

    def run(self) -> None:
        try:
            has_work = False
            while not self._is_stopping and self._drain_seconds is None:
                has_work = self.run_once(0.0 if has_work else 0.5)
            deadline = self._clock.now() + (self._drain_seconds or 0.0)
            while not self._is_stopping and self._release_idle_targets() and self._clock.now() < deadline:
                self.run_once(0.0)
        finally:
            for peer in list(self._scheduler.targets):
                self._listener.send(peer, Goodbye("stopping"))
                self._scheduler.drop(peer)
            self._listener.close()
            if self._weights is not None:
                self._weights.close()

    def stop(self) -> None:
        self._is_stopping = True
        self._listener.wake()

    def drain(self, seconds: float) -> None:
        """Answer the rounds that targets wait for, then send each target `Goodbye` and return from `run`. This takes at most
        `seconds`. Any thread may call it."""
        self._inbox.drain()
        self._drain_seconds = seconds
        self._listener.wake()

    def run_once(self, seconds: float) -> bool:
        """Receive, answer, run one pass. Waits up to `seconds` for a message. Returns whether there is more to draft."""
        self._inbox.receive(seconds)
        self._sender.answer_all()
        branches = self._scheduler.schedule()
        self._times.start_iteration()
        if not branches:
            return False
        drafted = self._run_pass(branches)
        if drafted is not None:
            self._append(branches, drafted)
            self._sender.answer_all()
            self._sender.send_branches()
        return True

    def status(self) -> DraftWorkerStatus:
        """Figures of the last iteration. Any thread may call it."""
        load, scheduler = self._sender.load(), self._scheduler
        return DraftWorkerStatus(
            name=self.name,
            epoch=self.epoch,
            peers=len(scheduler.targets),
            sequences=load.sequences,
            waiting=load.waiting,
            pass_seconds=self._times.average,
            rounds=scheduler.num_rounds,
            ready_rounds=scheduler.num_ready,
            alphas=scheduler.acceptance.alphas(""),
            malformed=self._listener.traffic.malformed,
            rejected=self._listener.num_rejected,
            paused=sum(target.ahead.paused_share is not None for target in list(scheduler.targets.values())),
        )

    def _run_pass(self, branches: list[DraftBranch]) -> Sequence[DraftedToken | None] | None:
        """Run and time one pass of the backend. Returns None if the pass failed, and closes its sequences."""
        rows, started = sum(max(1, branch.num_missing) for branch in branches), self._clock.now()
        try:
            drafted = self._backend.step(branches)
        except Exception:  # The remaining sequences and targets must not suffer
            logger.exception("a pass failed; its sequences are closed")
            self._fail(branches)
            return None
        seconds = self._clock.now() - started
        self._times.observe(seconds, is_urgent=self._scheduler.num_urgent > 0)
        if rows <= 2 * len(branches):  # no prompt
            self._scheduler.budget.observe_pass(rows, seconds)
        return drafted

    def _append(self, branches: list[DraftBranch], drafted: Sequence[DraftedToken | None]) -> None:
        """Append the drafted tokens to their branches. A branch without a token may lack a block of the cache."""
        for branch, token in zip(branches, drafted, strict=True):
            branch.append(token)
        if None in drafted:
            self._scheduler.free_blocks(
                branch for branch, token in zip(branches, drafted, strict=True) if token is None
            )

    def _fail(self, branches: list[DraftBranch]) -> None:
        for peer, target in self._scheduler.targets.items():
            sequences = self._scheduler.sequences_of(target, branches)
            if sequences:
                self._scheduler.close(target, sequences)
                text = "drafting failed: open these at another worker"
                self._sender.error(peer, ErrorCode.UNKNOWN_SEQUENCE, text, sequences)

    def _release_idle_targets(self) -> bool:
        """Send `Goodbye` to the targets that wait for no round. Returns whether any target is left."""
        targets = self._scheduler.targets
        for peer in [peer for peer, target in targets.items() if not target.is_waiting]:
            self._listener.send(peer, Goodbye("draining"))
            self._scheduler.drop(peer)
        return bool(targets)
