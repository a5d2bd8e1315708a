"""Subscription to the cache events of one worker, or of a vLLM server, with replay of missed batches."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from paceline.core.clock import Clock
from paceline.core.kv_events import CacheCleared, CacheEvent
from paceline.wire.codec import MalformedMessage
from paceline.wire.curve import encrypt_client
from paceline.wire.keys import Security
from paceline.wire.kv_events import END, decode

logger = logging.getLogger(__name__)

REPLAY_SECONDS = 2.0
"""Timeout of a replay. After it the missed batches are given up."""
RETRY_SECONDS = 30.0
"""Time from a failed replay to a request for the whole cache: the worker may have been busy."""
MAX_TRIES = 3
MAX_HELD_BATCHES = 10_000
MAX_BATCHES_PER_RECEIVE = 1_000
MAX_QUEUED_BATCHES = 100_000


class KvSubscriber:
    """Passes every event to `sink`, once and in order. If batches are lost, `sink` gets `CacheCleared` and then later events as
    if the cache had been empty: the view may miss blocks, but never contains removed ones. The whole cache is requested
    again later.

    Used by one thread. It calls `receive` when one of `sockets` is readable, and from time to time. No call waits.
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
        """Number of the next batch. None if any number is accepted."""
        self._last_live = -1
        self._requested: float | None = None
        """Time of the open replay request, or of its last reply. It is None without an open request."""
        self._num_tries = 0
        self._retry_time: float | None = None
        """Time to request the whole cache again."""
        self._is_full_replay = False
        """Whether the whole cache was requested and no reply has arrived. Without a reply, continue at `_resume_number`."""
        self._resume_number: int | None = None
        self._held: deque[tuple[int, bytes]] = deque(maxlen=MAX_HELD_BATCHES)
        """Live batches that arrived during a replay."""
        self._restart()

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        return (self._live,) if self._replay is None else (self._live, self._replay)

    @property
    def is_behind(self) -> bool:
        """Whether a replay is in progress."""
        return self._requested is not None

    def receive(self) -> None:
        """Process the messages that have arrived."""
        for socket in self.sockets:
            process = self._process_live if socket is self._live else self._process_replay
            with suppress(zmq.Again):
                for _ in range(MAX_BATCHES_PER_RECEIVE):
                    process(socket.recv_multipart(zmq.DONTWAIT))
        now = self._clock.now()
        if self._requested is not None and now - self._requested > REPLAY_SECONDS:
            self._resume() if self._is_full_replay else self._skip_missed()
        elif self._requested is None and self._retry_time is not None and now >= self._retry_time:
            self._resume_number, self._expected = self._expected, 0
            self._retry_time, self._is_full_replay = None, True
            self._request_replay()

    def close(self) -> None:
        for socket in self.sockets:
            socket.close(0)

    def _process_live(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            return
        topic, number, batch = frames[0], int.from_bytes(frames[1], "big"), frames[2]
        has_restarted = number <= self._last_live or (self._topic is not None and topic != self._topic)
        self._topic, self._last_live = topic, number
        if has_restarted:
            self._restart()
        self._held.append((number, batch))
        if self._requested is None:
            self._apply_held()

    def _process_replay(self, frames: Sequence[bytes]) -> None:
        """The frames are an empty frame, the topic (absent in vLLM before 0.26), the number and the batch."""
        if self._requested is None or len(frames) not in (3, 4) or len(frames[-2]) != 8:
            return  # invalid, or the end of a replay that timed out
        if frames[-2] == END and self._is_full_replay:
            self._resume()
            return
        if frames[-2] == END:
            self._requested = None
            self._apply_held()
            return
        if self._is_full_replay:
            self._is_full_replay = False
            self._sink(CacheCleared())
        if len(frames) == 4 and self._topic is None:
            self._topic = frames[1]  # there may be no live batch before a restart, which the topic shows
        self._requested = self._clock.now()
        number = int.from_bytes(frames[-2], "big")
        if self._expected is None or number >= self._expected:
            if number != self._expected:
                self._sink(CacheCleared())
            self._apply(number, frames[-1])

    def _apply_held(self) -> None:
        """Apply held batches up to the first gap, and request the missing ones."""
        while self._held:
            number, batch = self._held[0]
            if self._expected is not None and number > self._expected:
                self._request_replay()
                return
            self._held.popleft()
            if self._expected is None or number == self._expected:
                self._apply(number, batch)
        self._num_tries = 0

    def _apply(self, number: int, batch: bytes) -> None:
        self._expected = number + 1
        try:
            events = decode(batch)
        except MalformedMessage as malformed:
            logger.warning("invalid batch of cache events; the cache counts as empty: %s", malformed)
            events = [CacheCleared()]
        for event in events:
            self._sink(event)

    def _restart(self) -> None:
        """Discard everything and request all batches."""
        self._sink(CacheCleared())
        self._held.clear()
        self._expected, self._num_tries = 0, 0
        self._retry_time, self._is_full_replay = None, False
        self._request_replay()

    def _request_replay(self) -> None:
        """Request the batches from `_expected` on."""
        if self._replay is None or self._num_tries >= MAX_TRIES:
            self._skip_missed()
            return
        assert self._expected is not None
        self._num_tries += 1
        self._requested = self._clock.now()
        with suppress(zmq.Again):  # not connected, and the queue of requests is full
            self._replay.send_multipart([b"", self._expected.to_bytes(8, "big")], zmq.DONTWAIT)

    def _skip_missed(self) -> None:
        """Continue with the held batches."""
        self._sink(CacheCleared())
        self._resume_number = self._held[0][0] if self._held else None
        self._resume()

    def _resume(self) -> None:
        """Continue at `_resume_number`, and retry a full replay later."""
        self._requested, self._num_tries, self._is_full_replay = None, 0, False
        self._expected = self._resume_number
        if self._replay is not None:
            self._retry_time = self._clock.now() + RETRY_SECONDS
        self._apply_held()


def _connect(kind: int, address: str, security: Security | None) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_BATCHES)
    socket.setsockopt(zmq.SNDHWM, MAX_TRIES)
    socket.setsockopt(zmq.LINGER, 0)
    if security is not None:
        assert security.server is not None
        encrypt_client(socket, security.own, security.server)
    socket.connect(address)
    return socket
