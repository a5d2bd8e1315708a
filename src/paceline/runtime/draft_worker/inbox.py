"""Messages of targets to a draft worker: handshake, sequences, rounds and pings. A wrong message is answered with an error."""

from collections import defaultdict

from paceline.core.clock import Clock
from paceline.models.drafts.compatibility import Fingerprint, describe_mismatch
from paceline.runtime.draft_worker.pass_times import DraftPassTimes
from paceline.runtime.draft_worker.scheduler import DraftLimits, DraftScheduler, TargetSession
from paceline.runtime.draft_worker.sender import DraftSender
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.messages import (
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
from paceline.runtime.wire.transport import Listener, Peer

MESSAGES_PER_ITERATION = 256


class TargetInbox:
    """Receives from all targets and passes their requests to the scheduler. No message raises."""

    def __init__(
        self,
        name: str,
        epoch: int,
        tokenizer: Fingerprint,
        listener: Listener[FromTarget],
        scheduler: DraftScheduler,
        sender: DraftSender,
        times: DraftPassTimes,
        limits: DraftLimits,
        clock: Clock,
    ) -> None:
        """`name`, `epoch` and `tokenizer` are those of the worker, for the handshake."""
        self._name, self._epoch, self._tokenizer = name, epoch, tokenizer
        self._listener, self._scheduler, self._sender = listener, scheduler, sender
        self._times, self._limits, self._clock = times, limits, clock
        self._is_draining = False

    def drain(self) -> None:
        """Answer new targets with `Goodbye` from now on. Any thread may call it."""
        self._is_draining = True

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
        if self._is_draining:
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
                peer, Hello(VERSION, self._epoch, self._tokenizer, self._name, max_sequences, MAX_DEPTH)
            )

    def _handle(self, peer: Peer, target: TargetSession, message: FromTarget) -> None:
        if isinstance(message, Open | Advance | Close) and message.epoch != self._epoch:
            text = f"the message is for epoch {message.epoch}, this is {self._epoch}"
            self._sender.error(peer, ErrorCode.EPOCH, text)
        elif isinstance(message, Advance):
            self._advance(peer, target, message)
        elif isinstance(message, Open):
            self._open(peer, target, message)
        elif isinstance(message, Close):
            self._scheduler.close(target, message.sequences)
        elif isinstance(message, Ping):
            self._listener.send(peer, Pong(self._epoch, message.nonce, self._sender.load(target)))
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
