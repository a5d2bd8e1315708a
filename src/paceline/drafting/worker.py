"""A draft worker: drafts for many targets with one thread, one socket and one batch.

Each iteration receives all messages, answers complete rounds, and runs one pass of the backend. The pass takes the branches
that targets wait for, round-robin over targets, then branches drafted ahead. A round that is drafted on demand starts with the
next pass, and a target with many sequences does not delay the remaining targets.

`TargetInbox` takes the messages of targets: handshake, sequences, rounds and pings. A wrong message is answered with an error.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.clock import Clock, WallClock
from paceline.drafting.scheduler import DraftLimits, DraftPassTimes, DraftScheduler, TargetSession
from paceline.drafting.sender import DraftSender
from paceline.drafting.state import DraftBackend, DraftBranch, DraftedToken
from paceline.model_files.tokenizer import Fingerprint, describe_mismatch
from paceline.transfer.weights import WeightManager
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import (
    MAX_DEPTH,
    VERSION,
    Advance,
    Close,
    ErrorCode,
    FromTarget,
    Goodbye,
    Hello,
    Open,
    Ping,
    Pong,
)
from paceline.wire.lifecycle import Lifecycle
from paceline.wire.transport import Listener, Peer

logger = logging.getLogger(__name__)

MESSAGES_PER_ITERATION = 256


class TargetInbox:
    """Receives from all targets and passes their requests to the scheduler. No message raises."""

    def __init__(
        self,
        name: str,
        lifecycle: Lifecycle,
        tokenizer: Fingerprint,
        listener: Listener[FromTarget],
        scheduler: DraftScheduler,
        sender: DraftSender,
        times: DraftPassTimes,
        limits: DraftLimits,
        clock: Clock,
    ) -> None:
        """`name`, `lifecycle` and `tokenizer` are those of the worker, for the handshake."""
        self._name, self._lifecycle, self._tokenizer = name, lifecycle, tokenizer
        self._listener, self._scheduler, self._sender = listener, scheduler, sender
        self._times, self._limits, self._clock = times, limits, clock

    def receive(self, seconds: float) -> None:
        """Handle the messages that have arrived. Waits up to `seconds` for the first message. Drops targets that are silent."""
        for _ in range(MESSAGES_PER_ITERATION):
            received = self._listener.receive(seconds)
            if received is None:
                break
            seconds = 0.0
            peer, message = received.peer, received.message
            if isinstance(message, MalformedMessage):
                self._sender.error(peer, ErrorCode.MALFORMED, str(message))
            elif isinstance(message, Hello):
                self._hello(peer, message)
            elif (target := self._scheduler.targets.get(peer)) is None:
                if not isinstance(message, Goodbye):
                    self._sender.error(peer, ErrorCode.NO_HELLO, "send Hello first")
            else:
                target.last_message = self._clock.now()
                self._handle(peer, target, message)
        oldest = self._clock.now() - self._limits.silence
        for peer in [peer for peer, target in self._scheduler.targets.items() if target.last_message < oldest]:
            self._scheduler.drop(peer)

    def _hello(self, peer: Peer, hello: Hello) -> None:
        targets = self._scheduler.targets
        if self._lifecycle.is_draining:
            self._listener.send(peer, Goodbye("draining"))
            return
        # A gateway has no tokenizer to compare, and draft workers do not serve gateways
        mismatch = describe_mismatch(hello.tokenizer, self._tokenizer) if hello.tokenizer else "Hello has no tokenizer"
        if hello.version != VERSION:
            text = f"the target has protocol version {hello.version}, this worker {VERSION}: upgrade the older one"
            self._sender.error(peer, ErrorCode.VERSION, text)
        elif mismatch is not None:
            self._sender.error(peer, ErrorCode.TOKENIZER, mismatch)
        elif len(targets) >= self._limits.max_peers and peer not in targets:
            self._sender.busy(peer)
        else:
            self._scheduler.drop(peer)
            targets[peer] = TargetSession(hello.name, self._clock.now())
            max_sequences = self._limits.max_sequences
            self._listener.send(
                peer, Hello(VERSION, self._lifecycle.epoch, self._tokenizer, self._name, max_sequences, MAX_DEPTH)
            )

    def _handle(self, peer: Peer, target: TargetSession, message: FromTarget) -> None:
        if isinstance(message, Open | Advance | Close) and message.epoch != self._lifecycle.epoch:
            text = f"the message is for epoch {message.epoch}, this is {self._lifecycle.epoch}"
            self._sender.error(peer, ErrorCode.EPOCH, text)
        elif isinstance(message, Advance):
            self._advance(peer, target, message)
        elif isinstance(message, Open):
            self._open(peer, target, message)
        elif isinstance(message, Close):
            self._scheduler.close(target, message.sequences)
        elif isinstance(message, Ping):
            self._listener.send(peer, Pong(self._lifecycle.epoch, message.nonce, self._sender.load(target)))
        elif isinstance(message, Goodbye):
            self._scheduler.drop(peer)

    def _open(self, peer: Peer, target: TargetSession, message: Open) -> None:
        self._scheduler.close(target, [message.sequence])
        if not self._scheduler.has_room(message):
            self._sender.busy(peer, target, [message.sequence])
        elif error := self._scheduler.open(target, message):
            self._sender.error(peer, ErrorCode.MALFORMED, error, [message.sequence])

    def _advance(self, peer: Peer, target: TargetSession, message: Advance) -> None:
        """Commit tokens, start the next rounds, and answer those that are drafted already."""
        target.wants_branches = message.send_ahead
        if target.answered_at is not None:
            self._scheduler.budget.observe_pause(self._clock.now() - target.answered_at)
        if committed := [len(request.tokens) + request.num_kept for request in message.rounds]:
            target.rate.observe(sum(committed) / len(committed), self._clock.now())
        self._start_rounds(peer, target, message)
        self._scheduler.decide_ahead(target, message.rounds, self._times.ahead_delay)
        if not target.is_waiting:  # the target has its drafts already
            target.answered_at = self._clock.now()
        self._sender.answer(peer, target)

    def _start_rounds(self, peer: Peer, target: TargetSession, message: Advance) -> None:
        """Start the rounds of a message. Sequences with an error are closed and reported."""
        failed: defaultdict[ErrorCode, list[int]] = defaultdict(list)
        for request in message.rounds:
            code = self._scheduler.start_round(target, request)
            if code is not None:
                failed[code].append(request.sequence)
        for code, sequences in failed.items():
            self._scheduler.close(target, sequences)
            self._sender.error(peer, code, "open these again", sequences)


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
        """`tokenizer` is that of the draft. The worker refuses targets with another vocabulary. `weights` is
        closed at the end."""
        self.name = name
        limits, self._clock = limits or DraftLimits(), clock or WallClock()
        # The epoch is part of every message: five bytes instead of nine
        self._lifecycle = Lifecycle(listener, self._clock, epoch_bits=32)
        self._backend, self._listener, self._weights = backend, listener, weights
        self._scheduler = DraftScheduler(backend, vocab_size, limits)
        self._times = DraftPassTimes()
        self._sender = DraftSender(self.epoch, listener, self._scheduler, self._times, limits, self._clock)
        self._inbox = TargetInbox(
            name, self._lifecycle, tokenizer, listener, self._scheduler, self._sender, self._times, limits, self._clock
        )

    @property
    def epoch(self) -> int:
        return self._lifecycle.epoch

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def weight_address(self) -> str:
        """Address of its weight server. It is empty without a weight server."""
        return "" if self._weights is None else self._weights.address

    @property
    def is_loading(self) -> bool:
        return self._weights is not None and self._weights.progress is not None

    def run(self) -> None:
        lifecycle, targets = self._lifecycle, self._scheduler.targets
        try:
            has_work = False
            while not lifecycle.is_stopping and not lifecycle.is_draining:
                has_work = self.run_once(0.0 if has_work else 0.5)
            while not lifecycle.is_stopping and self._release_idle_targets() and not lifecycle.is_overdue():
                self.run_once(0.0)
        finally:
            lifecycle.say_goodbye(targets, "stopping")
            for peer in list(targets):
                self._scheduler.drop(peer)
            self._listener.close()
            if self._weights is not None:
                self._weights.close()

    def stop(self) -> None:
        self._lifecycle.stop()

    def drain(self, seconds: float) -> None:
        """Answer the rounds that targets wait for, then send each target `Goodbye` and return from `run`. This takes at most
        `seconds`. Any thread may call it."""
        self._lifecycle.drain(seconds)

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
