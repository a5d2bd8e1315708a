"""A draft worker: drafts for many targets with one thread, one socket and one batch.

Each iteration receives all messages, answers complete rounds, and runs one pass of the core. The pass takes the branches that
targets wait for, round-robin over targets, then branches drafted ahead. A round that is drafted on demand starts with the next
pass, and a target with many sequences does not delay the others.
"""

import logging
import secrets
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.clock import Clock, WallClock
from paceline.models.drafts.compatibility import Fingerprint, describe_mismatch
from paceline.runtime.draft_worker import distributions
from paceline.runtime.draft_worker.branches import BranchKey, pack
from paceline.runtime.draft_worker.core import DraftBranch, DraftCore
from paceline.runtime.draft_worker.scheduler import DraftLimits, DraftScheduler, TargetSession
from paceline.runtime.draft_worker.state import DraftState
from paceline.runtime.weights.manager import WeightManager
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.messages import (
    MAX_DEPTH,
    MAX_NAME,
    VERSION,
    Advance,
    Branches,
    Busy,
    Close,
    Drafts,
    Error,
    ErrorCode,
    FromTarget,
    Goodbye,
    Hello,
    Load,
    Open,
    Ping,
    Pong,
    RoundDraft,
    SequenceBranches,
)
from paceline.runtime.wire.transport import Listener, Peer

logger = logging.getLogger(__name__)

MESSAGES_PER_ITERATION = 256
BUSY_MS = 250
ANNOUNCE_SECONDS = 0.002
"""Shortest drafting time for which branches are announced. A faster draft arrives before a target could decide to wait."""


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
        core: DraftCore,
        listener: Listener[FromTarget],
        tokenizer: Fingerprint,
        vocab_size: int,
        limits: DraftLimits | None = None,
        clock: Clock | None = None,
        weights: WeightManager | None = None,
    ) -> None:
        """`tokenizer`: that of the draft. The worker refuses targets whose tokenizer or chat template differs. `weights` is
        closed at the end."""
        self.name = name
        self.epoch = secrets.randbits(32)  # part of every message: five bytes instead of nine
        self._limits = limits or DraftLimits()
        self._core, self._listener, self._clock = core, listener, clock or WallClock()
        self._tokenizer, self._weights = tokenizer, weights
        self._scheduler = DraftScheduler(core, vocab_size, self._limits)
        self._pass_seconds = 0.0
        """Recent time of a pass."""
        self._urgent_pass_seconds = 0.0
        """Recent time of a pass that a target waits for."""
        self._ahead_seconds = 0.0
        """Time of the last pass if all of it was ahead. The messages received next may have waited for its end."""
        self._is_stopping = False
        self._drain_seconds: float | None = None
        """Time that a drain may take; None: the worker does not drain."""

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def weight_address(self) -> str:
        """Address of its weight server; empty without one."""
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
        """Answer the rounds that targets wait for, then send each target `Goodbye` and return from `run`; all within `seconds`.
        Any thread may call it."""
        self._drain_seconds = seconds
        self._listener.wake()

    def _release_idle_targets(self) -> bool:
        """Send `Goodbye` to the targets that wait for no round. Returns whether any target is left."""
        targets = self._scheduler.targets
        for peer in [peer for peer, target in targets.items() if not target.is_waiting]:
            self._listener.send(peer, Goodbye("draining"))
            self._scheduler.drop(peer)
        return bool(targets)

    def run_once(self, seconds: float) -> bool:
        """Receive, answer, run one pass. Waits up to `seconds` for a message. Returns whether there is more to draft."""
        self._receive(seconds)
        self._answer_all()
        branches, self._ahead_seconds = self._scheduler.schedule(), 0.0
        if not branches:
            return False
        rows, started = sum(max(1, branch.num_missing) for branch in branches), self._clock.now()
        try:
            drafted = self._core.step(branches)
        except Exception:  # other sequences and targets must not suffer
            logger.exception("a pass failed; its sequences are closed")
            self._fail(branches)
            return True
        seconds = self._clock.now() - started
        self._pass_seconds = _moving_average(self._pass_seconds, seconds)
        if rows <= 2 * len(branches):  # no prompt
            self._scheduler.budget.observe_pass(rows, seconds)
        if self._scheduler.num_urgent:
            self._urgent_pass_seconds = _moving_average(self._urgent_pass_seconds, seconds)
        else:
            self._ahead_seconds = seconds
        for branch, token in zip(branches, drafted, strict=True):
            branch.append(token)
        if None in drafted:
            self._scheduler.free_blocks(
                branch for branch, token in zip(branches, drafted, strict=True) if token is None
            )
        self._answer_all()
        self._send_branches()
        return True

    def status(self) -> DraftWorkerStatus:
        """Figures of the last iteration. Any thread may call it."""
        load, scheduler = self._load(), self._scheduler
        return DraftWorkerStatus(
            name=self.name,
            epoch=self.epoch,
            peers=len(scheduler.targets),
            sequences=load.sequences,
            waiting=load.waiting,
            pass_seconds=self._pass_seconds,
            rounds=scheduler.num_rounds,
            ready_rounds=scheduler.num_ready,
            alphas=scheduler.acceptance.alphas(""),
            malformed=self._listener.traffic.malformed,
            rejected=self._listener.num_rejected,
            paused=sum(target.ahead.paused_share is not None for target in list(scheduler.targets.values())),
        )

    def _receive(self, seconds: float) -> None:
        for _ in range(MESSAGES_PER_ITERATION):
            received = self._listener.receive(seconds)
            if received is None:
                break
            seconds = 0.0
            peer, message = received.peer, received.message
            if isinstance(message, MalformedMessage):
                self._send_error(peer, ErrorCode.MALFORMED, str(message))
            elif isinstance(message, Hello):
                self._hello(peer, message)
            elif (target := self._scheduler.targets.get(peer)) is None:
                if not isinstance(message, Goodbye):
                    self._send_error(peer, ErrorCode.NO_HELLO, "send Hello first")
            else:
                target.last_message = self._clock.now()
                self._handle(peer, target, message)
        oldest = self._clock.now() - self._limits.silence
        for peer in [peer for peer, target in self._scheduler.targets.items() if target.last_message < oldest]:
            self._scheduler.drop(peer)

    def _handle(self, peer: Peer, target: TargetSession, message: FromTarget) -> None:
        if isinstance(message, Open | Advance | Close) and message.epoch != self.epoch:
            text = f"the message is for epoch {message.epoch}, this is {self.epoch}"
            self._send_error(peer, ErrorCode.EPOCH, text)
        elif isinstance(message, Advance):
            self._advance(peer, target, message)
        elif isinstance(message, Open):
            self._open(peer, target, message)
        elif isinstance(message, Close):
            self._scheduler.close(target, message.sequences)
        elif isinstance(message, Ping):
            self._listener.send(peer, Pong(self.epoch, message.nonce, self._load(target)))
        elif isinstance(message, Goodbye):
            self._scheduler.drop(peer)

    def _hello(self, peer: Peer, hello: Hello) -> None:
        targets = self._scheduler.targets
        if self._drain_seconds is not None:
            self._listener.send(peer, Goodbye("draining"))
            return
        # A gateway has no tokenizer to compare, and draft workers do not serve gateways
        mismatch = describe_mismatch(hello.tokenizer, self._tokenizer) if hello.tokenizer else "Hello has no tokenizer"
        if hello.version != VERSION:
            text = f"the target has protocol version {hello.version}, this worker {VERSION}: upgrade the older one"
            self._send_error(peer, ErrorCode.VERSION, text)
        elif mismatch is not None:
            self._send_error(peer, ErrorCode.TOKENIZER, mismatch)
        elif len(targets) >= self._limits.max_peers and peer not in targets:
            self._listener.send(peer, Busy(self.epoch, [], BUSY_MS, self._load()))
        else:
            self._scheduler.drop(peer)
            targets[peer] = TargetSession(hello.name, self._clock.now())
            max_sequences = self._limits.max_sequences
            self._listener.send(peer, Hello(VERSION, self.epoch, self._tokenizer, self.name, max_sequences, MAX_DEPTH))

    def _open(self, peer: Peer, target: TargetSession, message: Open) -> None:
        self._scheduler.close(target, [message.sequence])
        if not self._scheduler.has_room(message):
            self._listener.send(peer, Busy(self.epoch, [message.sequence], BUSY_MS, self._load(target)))
        elif error := self._scheduler.open(target, message):
            self._send_error(peer, ErrorCode.MALFORMED, error, [message.sequence])

    def _advance(self, peer: Peer, target: TargetSession, message: Advance) -> None:
        target.wants_branches = message.send_ahead
        if target.answered_at is not None:
            self._scheduler.budget.observe_pause(self._clock.now() - target.answered_at)
        if committed := [len(request.tokens) + request.num_kept for request in message.rounds]:
            target.rate.observe(sum(committed) / len(committed), self._clock.now())
        failed: defaultdict[ErrorCode, list[int]] = defaultdict(list)
        for request in message.rounds:
            code = self._scheduler.start_round(target, request)
            if code is not None:
                failed[code].append(request.sequence)
        for code, sequences in failed.items():
            self._scheduler.close(target, sequences)
            self._send_error(peer, code, "open these again", sequences)
        # The message arrived at any moment of the pass ahead: on average it waited for half of it
        delay = 0.5 * self._ahead_seconds / self._urgent_pass_seconds if self._urgent_pass_seconds else 0.0
        self._scheduler.decide_ahead(target, message.rounds, delay)
        if not target.is_waiting:  # the target has its drafts already
            target.answered_at = self._clock.now()
        self._answer(peer, target)

    def _answer_all(self) -> None:
        for peer, target in self._scheduler.targets.items():
            self._answer(peer, target)

    def _answer(self, peer: Peer, target: TargetSession) -> None:
        """Send the drafts of all rounds that are due, in one message."""
        self._scheduler.cut(target)
        drafts = []
        for sequence, state in target.sequences.items():
            if state.is_due:
                state.mark_answered()
                announces = target.wants_branches and target.is_ahead and self._announces(state)
                started = state.start_branches(self._scheduler.plan) if announces else ()
                alternatives = self._scheduler.alternatives(state)
                drafts.append(_round_draft(sequence, state, started, alternatives))
        if drafts:
            self._listener.send(peer, Drafts(self.epoch, drafts, self._load(target)))
            target.answered_at = self._clock.now()

    def _send_branches(self) -> None:
        for peer, target in self._scheduler.targets.items():
            if not target.wants_branches or not target.is_ahead:
                continue
            records: list[SequenceBranches] = []
            for sequence, state in target.sequences.items():
                unsent = state.unsent_branches(self._announces(state))
                branches = [(key, [one.token for one in drafted]) for key, drafted in unsent]
                records += pack(sequence, state.round, branches)
            if records:
                self._listener.send(peer, Branches(self.epoch, records))

    def _announces(self, state: DraftState) -> bool:
        return self._limits.ahead_nodes > 0 and self._pass_seconds * state.depth >= ANNOUNCE_SECONDS

    def _fail(self, branches: list[DraftBranch]) -> None:
        for peer, target in self._scheduler.targets.items():
            sequences = self._scheduler.sequences_of(target, branches)
            if sequences:
                self._scheduler.close(target, sequences)
                text = "drafting failed: open these at another worker"
                self._send_error(peer, ErrorCode.UNKNOWN_SEQUENCE, text, sequences)

    def _send_error(self, peer: Peer, code: ErrorCode, text: str, sequences: Iterable[int] = ()) -> None:
        self._listener.send(peer, Error(code, text[:MAX_NAME], list(sequences)))

    def _load(self, target: TargetSession | None = None) -> Load:
        return self._scheduler.load(self._pass_seconds, target)


def _moving_average(average: float, value: float) -> float:
    return average + 0.1 * (value - average) if average else value


def _round_draft(
    sequence: int, state: DraftState, started: Iterable[BranchKey], alternatives: Iterable[BranchKey]
) -> RoundDraft:
    draft, data = state.draft, b""
    if state.params.needs_distribution:
        data = distributions.encode([one.distribution for one in draft if one.distribution is not None])
    tokens = [one.token for one in draft]
    return RoundDraft(sequence, state.round, tokens, data, state.was_ready, _flat(started), _flat(alternatives))


def _flat(keys: Iterable[BranchKey]) -> list[int]:
    return [part for key in keys for part in key]
