"""The requests of a gateway: which worker generates each of them, and who goes on when that one is lost."""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from paceline.cluster.routing.kv_index import KvIndex
from paceline.cluster.routing.peer_hints import find_peer
from paceline.cluster.routing.router import Prompt, Router
from paceline.core.errors import EngineClosed, InvalidRequest, PacelineError
from paceline.runtime.gateway_client.stream import Event, Gap, Stream
from paceline.runtime.gateway_client.target_connection import TargetLine
from paceline.runtime.wire.request import to_submit
from paceline.runtime.wire.stream_messages import Output, Refused, Withdraw

logger = logging.getLogger(__name__)

MAX_MOVES = 8
"""Workers a stream may lose without getting any further: one that kills whoever takes it must end."""


class Streams:
    """One thread, the pool's, calls everything but `reserve`; listeners are called on it."""

    def __init__(self, lines: Mapping[str, TargetLine], router: Router, index: KvIndex | None = None) -> None:
        """`lines`: a live view of the workers there are. `index`: what they have cached and may take from each other."""
        self._lines = lines
        self._router = router
        self._index = index
        self._attempts = itertools.count(1)
        self._streams: dict[str, Stream] = {}
        self._homeless: deque[Stream] = deque()
        self._lock = threading.Lock()  # guards `_ids`
        self._ids: set[str] = set()
        self.continued = 0
        """Streams that went on elsewhere."""

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._streams

    def reserve(self, request_id: str) -> None:
        """From any thread: nobody else may use the id until its stream is over."""
        with self._lock:
            if request_id in self._ids:
                raise InvalidRequest(f"a request with id {request_id!r} is already running", field="id")
            self._ids.add(request_id)

    def begin(self, stream: Stream) -> None:
        self._streams[stream.request.id] = stream
        self._homeless.append(stream)

    def end(self, request_id: str) -> None:
        """Its worker is told to stop, its listener nothing."""
        stream = self._streams.get(request_id)
        if stream is not None:
            line = self._lines.get(stream.worker or "")
            if line is not None:
                line.connection.send(Withdraw([stream.attempt]))
            self._forget(stream)

    def fail_all(self, error: PacelineError) -> None:
        for stream in self._streams.values():
            self._tell(stream, error)

    def take(self, line: TargetLine, output: Output) -> None:
        stream = line.streams.get(output.attempt)
        if stream is None:
            return
        try:
            step = stream.take(output)
        except Gap as gap:
            logger.warning("%s lost a part of a stream (%s); it is continued from what came", line.name, gap)
            line.connection.send(Withdraw([stream.attempt]))
            self.move(stream)
            return
        line.tokens += len(step.tokens)
        if stream.heard != stream.attempt and stream.pinned is None:
            stream.heard = stream.attempt
            line.prompt_tokens += len(stream.request.prompt_ids)
            line.cached_tokens += min(output.num_cached, len(stream.request.prompt_ids))
        self._router.started(stream.request.id, output.num_cached)
        if stream.is_finished:
            self._forget(stream)
        self._tell(stream, step)

    def refused(self, line: TargetLine, message: Refused) -> None:
        stream = line.streams.get(message.attempt)
        if stream is None:
            return
        if message.invalid:
            self._forget(stream)
            self._tell(stream, InvalidRequest(message.message, message.field))
        else:
            logger.warning("%s gave up a stream: %s", line.name, message.message)
            self.move(stream)

    def lose(self, line: TargetLine, why: str) -> None:
        """Continue all that the worker had. Should it still be there, it is told to stop; what it says is not heard."""
        streams = line.take_streams()
        if streams:
            logger.warning("target worker %s %s; %d streams are continued elsewhere", line.name, why, len(streams))
            line.connection.send(Withdraw([stream.attempt for stream in streams]))
        for stream in streams:
            self.move(stream)

    def move(self, stream: Stream) -> None:
        """To another worker; not if it is pinned to one, or has lost too many."""
        self._leave(stream)
        stream.worker = None
        stream.moves += 1
        if stream.pinned is not None:
            self._forget(stream)
        elif stream.moves > MAX_MOVES:
            self._forget(stream)
            text = f"the request lost {stream.moves} workers in a row without a token, and was given up"
            self._tell(stream, EngineClosed(text))
        else:
            self.continued += 1
            self._homeless.append(stream)

    def place(self) -> None:
        """Send every stream without a worker to one, if there is any."""
        if not self._homeless:
            return
        usable = [line for line in self._lines.values() if line.takes_streams]
        # Whoever is still loading gets something only where there is nobody else
        loads = {line.name: line.load for line in [line for line in usable if not line.is_loading] or usable}
        for _ in range(len(self._homeless) if loads else 0):
            stream = self._homeless.popleft()
            request = stream.request
            prompt = Prompt(request.prompt_ids, request.cache_salt, request.id)
            name = stream.worker = self._router.choose(prompt, list(loads.values()))
            loads[name] = replace(loads[name], assigned=loads[name].assigned + stream.num_unfinished)
            if self._index is not None and len(loads) > 1:
                stream.peer = find_peer(self._index, prompt, name, loads)
            self.send(stream)

    def send(self, stream: Stream) -> None:
        """To the worker it was routed or is pinned to."""
        line = self._lines[stream.pinned or stream.worker or ""]
        assert line.welcome is not None
        stream.attempt, stream.worker = next(self._attempts), line.name
        line.streams[stream.attempt] = stream
        if not line.connection.send(to_submit(stream.rest(), stream.attempt, line.welcome.epoch, stream.peer)):
            self.move(stream)

    def _leave(self, stream: Stream) -> None:
        line = self._lines.get(stream.worker or "")
        if line is not None:
            line.streams.pop(stream.attempt, None)
        self._router.ended(stream.request.id)

    def _forget(self, stream: Stream) -> None:
        self._leave(stream)
        if stream in self._homeless:
            self._homeless.remove(stream)
        self._streams.pop(stream.request.id, None)
        with self._lock:
            self._ids.discard(stream.request.id)

    def _tell(self, stream: Stream, event: Event) -> None:
        try:
            stream.listener(event)
        except Exception:
            logger.exception("a listener failed; its request is cancelled")
            self.end(stream.request.id)
