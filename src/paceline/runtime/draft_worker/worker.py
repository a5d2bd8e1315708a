"""Drafts for many targets at once: one thread, one socket, one batch.

Every turn of the loop hears all that has come, answers what is ready, and makes one pass of the core over what is wanted:
first what targets wait for, by turns of the targets, then what they may ask for next. So a round that has to be drafted
afresh starts with the next pass and keeps no other waiting, and a target with many sequences does not crowd out another.
"""

import logging
import secrets
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.clock import Clock, WallClock
from paceline.runtime.draft_worker import distributions as laws
from paceline.runtime.draft_worker.core import DraftCore
from paceline.runtime.draft_worker.packed_branches import pack
from paceline.runtime.draft_worker.scheduler import DraftLimits, Roster, Target
from paceline.runtime.draft_worker.state import Key, Line, Rolling
from paceline.runtime.wire.codec import Malformed
from paceline.runtime.wire.messages import (
    MAX_DEPTH,
    OLDEST,
    VERSION,
    Advance,
    Ahead,
    Branch,
    Branches,
    Busy,
    Close,
    Drafted,
    Drafts,
    Error,
    Fault,
    FromTarget,
    Goodbye,
    Hello,
    Load,
    Open,
    Ping,
    Pong,
    common_version,
)
from paceline.runtime.wire.transport import Listener, Peer

logger = logging.getLogger(__name__)

MESSAGES_A_TURN = 256
BUSY_MS = 250
ANNOUNCED_SECONDS = 0.002
"""A draft that is made sooner is not announced first: it is there before anybody could decide to wait for it."""


@dataclass(frozen=True, slots=True)
class DraftSnapshot:
    """What a draft worker says about itself."""

    name: str
    epoch: int
    peers: int
    sequences: int
    waiting: int
    pass_seconds: float
    rounds: int
    ready_rounds: int
    """Answered from what had been drafted ahead."""
    alphas: tuple[float, ...]
    malformed: int
    turned_away: int
    resting: int
    """Targets for which it has stopped drafting ahead."""


class DraftWorker:
    """Constructed listening; `run` serves until `stop`, which any thread may call. Nothing a peer sends ends it."""

    def __init__(
        self,
        name: str,
        core: DraftCore,
        listener: Listener[FromTarget],
        vocabulary: str,
        vocab_size: int,
        limits: DraftLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`vocabulary`: its checksum. Targets of another one are turned away."""
        self.name = name
        self.epoch = secrets.randbits(32)  # it is in every message: five bytes, not nine
        self._limits = limits or DraftLimits()
        self._core, self._listener, self._clock = core, listener, clock or WallClock()
        self._vocabulary = vocabulary
        self._roster = Roster(core, vocab_size, self._limits)
        self._pass_seconds = 0.0
        self._asked_seconds = 0.0
        """Of a pass that is waited for, of late."""
        self._behind = 0.0
        """Seconds of the pass that has just ended, if it was ahead: what is heard next may have waited for its end."""
        self._is_stopping = False

    @property
    def address(self) -> str:
        return self._listener.address

    def run(self) -> None:
        try:
            has_work = False
            while not self._is_stopping:
                has_work = self.turn(0.0 if has_work else 0.5)
        finally:
            for peer in list(self._roster.targets):
                self._listener.send(peer, Goodbye("stopping"))
                self._roster.drop(peer)
            self._listener.close()

    def stop(self) -> None:
        self._is_stopping = True
        self._listener.wake()

    def turn(self, seconds: float) -> bool:
        """Hear, answer, draft one token; waits up to `seconds` for something to hear. True: there is more to draft."""
        self._hear(seconds)
        self._answer_all()
        lines, self._behind = self._roster.choose(), 0.0
        if not lines:
            return False
        started = self._clock.now()
        try:
            drawn = self._core.step([line.ride for line in lines])
        except Exception:  # whatever it was, the other rides and the peers are not to suffer for it
            logger.exception("a pass failed; its sequences are dropped")
            self._fail(lines)
            return True
        took = self._clock.now() - started
        self._pass_seconds = _followed(self._pass_seconds, took)
        if self._roster.num_urgent:
            self._asked_seconds = _followed(self._asked_seconds, took)
        else:
            self._behind = took
        for line, token in zip(lines, drawn, strict=True):
            line.append(token)
        if None in drawn:
            self._roster.make_room(line for line, token in zip(lines, drawn, strict=True) if token is None)
        self._answer_all()
        self._send_ahead()
        return True

    def snapshot(self) -> DraftSnapshot:
        """Safe from any thread: figures as of the last turn."""
        load, roster = self._load(), self._roster
        return DraftSnapshot(
            name=self.name,
            epoch=self.epoch,
            peers=len(roster.targets),
            sequences=load.sequences,
            waiting=load.waiting,
            pass_seconds=self._pass_seconds,
            rounds=roster.num_rounds,
            ready_rounds=roster.num_ready,
            alphas=roster.acceptance.alphas(""),
            malformed=self._listener.traffic.malformed,
            turned_away=self._listener.num_turned_away,
            resting=sum(target.ahead.resting is not None for target in list(roster.targets.values())),
        )

    def _hear(self, seconds: float) -> None:
        for _ in range(MESSAGES_A_TURN):
            received = self._listener.receive(seconds)
            if received is None:
                break
            seconds = 0.0
            peer, message = received.peer, received.message
            if isinstance(message, Malformed):
                self._refuse(peer, Fault.MALFORMED, str(message))
            elif isinstance(message, Hello):
                self._hello(peer, message)
            elif (target := self._roster.targets.get(peer)) is None:
                if not isinstance(message, Goodbye):
                    self._refuse(peer, Fault.STRANGER, "say Hello first")
            else:
                target.heard = self._clock.now()
                self._handle(peer, target, message)
        oldest = self._clock.now() - self._limits.silence
        for peer in [peer for peer, target in self._roster.targets.items() if target.heard < oldest]:
            self._roster.drop(peer)

    def _handle(self, peer: Peer, target: Target, message: FromTarget) -> None:
        if isinstance(message, Open | Advance | Close) and message.epoch != self.epoch:
            self._refuse(peer, Fault.EPOCH, f"that was for epoch {message.epoch}, this is {self.epoch}")
        elif isinstance(message, Advance):
            self._advance(peer, target, message)
        elif isinstance(message, Open):
            self._open(peer, target, message)
        elif isinstance(message, Close):
            self._roster.end(target, message.sequences)
        elif isinstance(message, Ping):
            self._listener.send(peer, Pong(self.epoch, message.nonce, self._load(target)))
        elif isinstance(message, Goodbye):
            self._roster.drop(peer)

    def _hello(self, peer: Peer, hello: Hello) -> None:
        version = common_version(hello)
        targets = self._roster.targets
        if version is None:
            text = f"you speak {hello.oldest} to {hello.version}, I {OLDEST} to {VERSION}: upgrade the older one"
            self._refuse(peer, Fault.VERSION, text)
        elif hello.vocabulary != self._vocabulary:
            text = f"your vocabulary is {hello.vocabulary[:16]}, mine {self._vocabulary[:16]}"
            self._refuse(peer, Fault.VOCABULARY, text)
        elif len(targets) >= self._limits.max_peers and peer not in targets:
            self._listener.send(peer, Busy(self.epoch, [], BUSY_MS, self._load()))
        else:
            self._roster.drop(peer)
            targets[peer] = Target(version, hello.name, self._clock.now())
            room = self._limits.max_sequences
            self._listener.send(peer, Hello(VERSION, OLDEST, self.epoch, self._vocabulary, self.name, room, MAX_DEPTH))

    def _open(self, peer: Peer, target: Target, message: Open) -> None:
        self._roster.end(target, [message.sequence])
        if not self._roster.has_room(message):
            self._listener.send(peer, Busy(self.epoch, [message.sequence], BUSY_MS, self._load(target)))
        elif wrong := self._roster.open(target, message):
            self._refuse(peer, Fault.MALFORMED, wrong, [message.sequence])

    def _advance(self, peer: Peer, target: Target, message: Advance) -> None:
        target.wants_ahead = message.ahead
        wrong: defaultdict[Fault, list[int]] = defaultdict(list)
        for step in message.steps:
            fault = self._roster.step(target, step)
            if fault is not None:
                wrong[fault].append(step.sequence)
        for fault, sequences in wrong.items():
            self._roster.end(target, sequences)
            self._refuse(peer, fault, "open these again", sequences)
        # It came at any moment of the pass that was under way: half of it on average
        delay = 0.5 * self._behind / self._asked_seconds if self._asked_seconds else 0.0
        self._roster.settle(target, message.steps, delay)
        self._answer(peer, target)

    def _answer_all(self) -> None:
        for peer, target in self._roster.targets.items():
            self._answer(peer, target)

    def _answer(self, peer: Peer, target: Target) -> None:
        """Every round that is complete, in one message."""
        drafts = []
        for number, rolling in target.sequences.items():
            if rolling.is_due:
                rolling.answered()
                is_told = target.wants_ahead and target.is_ahead and target.version >= 3 and self._announces(rolling)
                drafts.append(_drafted(number, rolling, rolling.begun(self._roster.plan) if is_told else ()))
        if drafts:
            self._listener.send(peer, Drafts(self.epoch, drafts, self._load(target)))

    def _send_ahead(self) -> None:
        for peer, target in self._roster.targets.items():
            if not target.wants_ahead or not target.is_ahead:
                continue
            ahead: list[Ahead] = []
            for number, rolling in target.sequences.items():
                prepared = rolling.prepared(self._announces(rolling))
                told = [(key, [one.token for one in drawn]) for key, drawn in prepared]
                if target.version >= 3:
                    ahead += pack(number, rolling.round, told)
                elif told:
                    ahead.append(Ahead(number, rolling.round, [Branch(*key, tokens) for key, tokens in told]))
            if ahead:
                self._listener.send(peer, Branches(self.epoch, ahead))

    def _announces(self, rolling: Rolling) -> bool:
        return self._limits.ahead_nodes > 0 and self._pass_seconds * rolling.depth >= ANNOUNCED_SECONDS

    def _fail(self, lines: list[Line]) -> None:
        for peer, target in self._roster.targets.items():
            sequences = self._roster.riders(target, lines)
            if sequences:
                self._roster.end(target, sequences)
                self._refuse(peer, Fault.UNKNOWN, "drafting failed: open these elsewhere", sequences)

    def _refuse(self, peer: Peer, fault: Fault, text: str, sequences: Iterable[int] = ()) -> None:
        self._listener.send(peer, Error(fault, text[:256], list(sequences)))

    def _load(self, target: Target | None = None) -> Load:
        return self._roster.load(self._pass_seconds, target)


def _followed(average: float, seconds: float) -> float:
    return average + 0.1 * (seconds - average) if average else seconds


def _drafted(number: int, rolling: Rolling, begun: Iterable[Key]) -> Drafted:
    draft = rolling.draft
    data = laws.encode([one.law for one in draft if one.law is not None]) if rolling.facts.wants_law else b""
    told = [part for key in begun for part in key]
    return Drafted(number, rolling.round, [one.token for one in draft], data, rolling.was_ready, told)
