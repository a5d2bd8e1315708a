"""Follows what one worker, ours or a stock vLLM server, says about its cache, and makes up for what was missed."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from paceline.core.clock import Clock
from paceline.core.kv_events import CacheCleared, CacheEvent
from paceline.runtime.kv_events.events import decode
from paceline.runtime.kv_events.publisher import END
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.curve import encrypt_client
from paceline.runtime.wire.keys import Security

logger = logging.getLogger(__name__)

REPLAY_SECONDS = 2.0
"""How long an answer may take until what was missed is given up."""
RETRY_SECONDS = 30.0
"""After that, whoever did not answer is asked for everything again: it may have been busy."""
MAX_TRIES = 3
MAX_HELD = 10_000
MAX_AT_ONCE = 1_000
QUEUE_BATCHES = 100_000


class KvSubscriber:
    """Hands every event to `sink`, once and in order. Where something is lost, a `CacheCleared` comes instead, and what follows
    is told as if the cache had been empty: too little may be known, never something that is gone. All of it is asked for again
    later.

    Owned by one thread, which calls `receive` when one of `sockets` has something, and now and then. It never waits.
    """

    def __init__(
        self,
        address: str,
        replay_address: str | None,
        sink: Callable[[CacheEvent], None],
        clock: Clock,
        security: Security | None = None,
    ) -> None:
        self._sink = sink
        self._clock = clock
        self._live = _connect(zmq.SUB, address, security)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._replay = None if replay_address is None else _connect(zmq.DEALER, replay_address, security)
        self._topic: bytes | None = None
        self._expected: int | None = None
        """Number of the batch that is wanted next; None: whichever comes."""
        self._last_live = -1
        self._asked: float | None = None
        """Since when an answer is waited for."""
        self._tries = 0
        self._retry: float | None = None
        """When to ask for everything again."""
        self._resume: int | None = None
        self._is_retelling = False
        """Whether everything was asked for again, and nothing came yet: should that stay so, go on from `_resume`."""
        self._held: deque[tuple[int, bytes]] = deque(maxlen=MAX_HELD)
        """Batches that came meanwhile."""
        self._restart()

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        return (self._live,) if self._replay is None else (self._live, self._replay)

    @property
    def is_behind(self) -> bool:
        """Whether something that was missed is still being asked for."""
        return self._asked is not None

    def receive(self) -> None:
        """Take in what came."""
        for socket in self.sockets:
            hear = self._hear_live if socket is self._live else self._hear_replay
            with suppress(zmq.Again):
                for _ in range(MAX_AT_ONCE):
                    hear(socket.recv_multipart(zmq.DONTWAIT))
        now = self._clock.now()
        if self._asked is not None and now - self._asked > REPLAY_SECONDS:
            self._go_on() if self._is_retelling else self._give_up()
        elif self._asked is None and self._retry is not None and now >= self._retry:
            self._resume, self._expected = self._expected, 0
            self._retry, self._is_retelling = None, True
            self._ask()

    def close(self) -> None:
        for socket in self.sockets:
            socket.close(0)

    def _hear_live(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            return
        topic, number, batch = frames[0], int.from_bytes(frames[1], "big"), frames[2]
        is_new_life = number <= self._last_live or (self._topic is not None and topic != self._topic)
        self._topic, self._last_live = topic, number
        if is_new_life:
            self._restart()
        self._held.append((number, batch))
        if self._asked is None:
            self._take_held()

    def _hear_replay(self, frames: Sequence[bytes]) -> None:
        """An empty frame, the topic (which vLLM before 0.26 leaves out), number, batch."""
        if self._asked is None or len(frames) not in (3, 4) or len(frames[-2]) != 8:
            return  # no answer, or the end of one that was given up
        if frames[-2] == END and self._is_retelling:
            self._go_on()
            return
        if frames[-2] == END:
            self._asked = None
            self._take_held()
            return
        if self._is_retelling:
            self._is_retelling = False
            self._sink(CacheCleared())
        if len(frames) == 4 and self._topic is None:
            self._topic = frames[1]  # nothing else may be heard of this life, and the next is known by it
        self._asked = self._clock.now()
        number = int.from_bytes(frames[-2], "big")
        if self._expected is None or number >= self._expected:
            if number != self._expected:
                self._sink(CacheCleared())
            self._apply(number, frames[-1])

    def _take_held(self) -> None:
        """In order, as far as there is no gap; then ask for what is missing."""
        while self._held:
            number, batch = self._held[0]
            if self._expected is not None and number > self._expected:
                self._ask()
                return
            self._held.popleft()
            if self._expected is None or number == self._expected:
                self._apply(number, batch)
        self._tries = 0

    def _apply(self, number: int, batch: bytes) -> None:
        self._expected = number + 1
        try:
            events = decode(batch)
        except MalformedMessage as malformed:
            logger.warning(
                "a batch of cache events cannot be read, and all known of that cache is dropped: %s", malformed
            )
            events = [CacheCleared()]
        for event in events:
            self._sink(event)

    def _restart(self) -> None:
        """Nothing of what was known holds: tell everything from the first batch on."""
        self._sink(CacheCleared())
        self._held.clear()
        self._expected, self._tries = 0, 0
        self._retry, self._is_retelling = None, False
        self._ask()

    def _ask(self) -> None:
        if self._replay is None or self._tries >= MAX_TRIES:
            self._give_up()
            return
        assert self._expected is not None
        self._tries += 1
        self._asked = self._clock.now()
        with suppress(zmq.Again):  # nobody is there, and questions wait for them already
            self._replay.send_multipart([b"", self._expected.to_bytes(8, "big")], zmq.DONTWAIT)

    def _give_up(self) -> None:
        """Go on with whatever came since."""
        self._sink(CacheCleared())
        self._resume = self._held[0][0] if self._held else None
        self._go_on()

    def _go_on(self) -> None:
        """From `_resume`, for now."""
        self._asked, self._tries, self._is_retelling = None, 0, False
        self._expected = self._resume
        if self._replay is not None:
            self._retry = self._clock.now() + RETRY_SECONDS
        self._take_held()


def _connect(kind: int, address: str, security: Security | None) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.RCVHWM, QUEUE_BATCHES)
    socket.setsockopt(zmq.SNDHWM, MAX_TRIES)
    socket.setsockopt(zmq.LINGER, 0)
    if security is not None:
        assert security.server is not None
        encrypt_client(socket, security.own, security.server)
    socket.connect(address)
    return socket
