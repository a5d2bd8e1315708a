"""All streams of a gateway: assigns each to a worker, and reassigns it when the worker is lost."""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from paceline.core.errors import EngineClosed, GenerationFailed, InvalidRequest, PacelineError, WeightsChanged
from paceline.core.output import OutputEvent
from paceline.core.request import Request
from paceline.policy.routing.kv_index import KvIndex, find_peer
from paceline.policy.routing.router import RoutedPrompt, Router
from paceline.targets.connection import TargetConnection
from paceline.targets.stream import Stream, StreamGap
from paceline.wire.gateway_messages import Cancel, FailureKind, Heartbeat, Output, RequestFailed

logger = logging.getLogger(__name__)

MAX_LOST_WORKERS = 8
"""Workers that a stream may lose without an output."""
MAX_DEATHS = 3
"""Workers that may die while they start one request. After the first death the request is a suspect: it shares a worker with no
second suspect. A request that kills every worker must end before it has killed them all."""
MAX_QUARANTINED = 256
"""Requests that killed workers, which are remembered and refused."""


class StreamTable:
    """The pool's thread calls every method except `reserve`, and listeners are called on it."""

    def __init__(self, targets: Mapping[str, TargetConnection], router: Router, index: KvIndex | None = None) -> None:
        """`targets` is a live view of the connections. `index` holds the cached blocks that workers may fetch from each
        other."""
        self._targets = targets
        self._router = router
        self._index = index
        self._attempts = itertools.count(1)
        self._streams: dict[str, Stream] = {}
        self._unassigned: deque[Stream] = deque()
        self._lock = threading.Lock()  # guards `_ids`
        self._ids: set[str] = set()
        self.num_continued = 0
        """Streams continued on another worker."""
        self._quarantine: dict[int, None] = {}
        """Digests of requests that killed workers, the oldest first."""

    def reserve(self, request_id: str) -> None:
        """Reserve the id until its stream ends. It is thread-safe. Raises `InvalidRequest` if it is in use."""
        with self._lock:
            if request_id in self._ids:
                raise InvalidRequest(f"a request with id {request_id!r} is already running", field="id")
            self._ids.add(request_id)

    def add(self, stream: Stream) -> None:
        self._streams[stream.request.id] = stream
        if _digest(stream.request) in self._quarantine:
            self._end_suspect(stream)
            return
        self._unassigned.append(stream)

    def cancel(self, request_id: str) -> None:
        """Stop the stream at its worker. The listener receives nothing more."""
        stream = self._streams.get(request_id)
        if stream is not None:
            target = self._targets.get(stream.worker or "")
            if target is not None:
                target.send(Cancel([stream.attempt]))
            self._remove(stream)

    def fail_all(self, error: PacelineError) -> None:
        for stream in self._streams.values():
            self._notify(stream, error)

    def handle_output(self, target: TargetConnection, output: Output) -> None:
        stream = target.streams.get(output.attempt)
        if stream is None:
            return
        if not stream.has_started and target.welcome is not None:
            stream.generated_by(target.welcome.fingerprint)
        try:
            step = stream.add(output)
        except StreamGap as gap:
            logger.warning("%s: an output is missing (%s); the stream is continued", target.name, gap)
            target.send(Cancel([stream.attempt]))
            self._reassign(stream)
            return
        target.num_tokens += len(step.tokens)
        if not stream.has_started:
            self._start(target, stream, output.num_cached)
        if output.finish_reason is not None and stream.is_finished:
            self._remove(stream)
        self._notify(stream, step)

    def _start(self, target: TargetConnection, stream: Stream, num_cached: int) -> None:
        """The first output of an attempt has arrived."""
        stream.started_attempt = stream.attempt
        self._router.started(stream.request.id, num_cached)
        if stream.pinned is None:
            target.num_prompt_tokens += len(stream.request.prompt_ids)
            target.num_cached_tokens += min(num_cached, len(stream.request.prompt_ids))

    def handle_failure(self, target: TargetConnection, message: RequestFailed) -> None:
        """End a request that is invalid or that an engine failed on. A request that failed for a different reason is continued
        on another worker."""
        stream = target.streams.get(message.attempt)
        if stream is None:
            return
        if message.kind is FailureKind.INVALID:
            self._remove(stream)
            self._notify(stream, InvalidRequest(message.message, message.field))
        elif message.kind is FailureKind.CHANGED:
            self._remove(stream)
            self._notify(stream, WeightsChanged(message.message))
        elif message.kind is FailureKind.FAILED:
            self._remove(stream)
            self._notify(stream, GenerationFailed(message.message))
        else:
            logger.warning("%s stopped a stream: %s", target.name, message.message)
            self._reassign(stream)

    def handle_heartbeat(self, target: TargetConnection, heartbeat: Heartbeat) -> None:
        """Continue the streams that the worker no longer has: it dropped them while this gateway was suspended."""
        lost = target.take_lost_streams(heartbeat)
        if lost:
            logger.warning("%s has lost %d streams; they are continued", target.name, len(lost))
        for stream in lost:
            self._reassign(stream)

    def release(self, target: TargetConnection, reason: str, has_died: bool = False) -> None:
        """Reassign all streams of a lost worker. If it is still alive, it must stop them. `has_died` says that its process
        ended without a `Goodbye`. A request that it had not started yet may then be the reason."""
        streams = target.remove_streams()
        if has_died:
            for stream in streams:
                stream.num_deaths += not stream.has_started
        if streams:
            logger.warning("target worker %s %s; %d streams are continued elsewhere", target.name, reason, len(streams))
            target.send(Cancel([stream.attempt for stream in streams]))
        for stream in streams:
            self._reassign(stream)

    def assign(self) -> None:
        """Route every unassigned stream, if any worker is usable."""
        if not self._unassigned:
            return
        usable = [target for target in self._targets.values() if target.takes_streams and not target.is_overloaded]
        loaded = [target for target in usable if not target.is_loading]
        loads = {target.name: target.load for target in loaded or usable}
        for _ in range(len(self._unassigned) if loads else 0):
            stream = self._unassigned.popleft()
            request, choices = stream.request, loads
            if stream.fingerprint is not None:
                choices = {name: load for name, load in choices.items() if self._fits(stream, name)}
            if stream.is_suspect:
                choices = {name: load for name, load in choices.items() if not self._targets[name].has_suspect}
            if not choices:
                self._unassigned.append(stream)
                continue
            prompt = RoutedPrompt(request.prompt_ids, request.cache_salt, request.id)
            name = stream.worker = self._router.choose(prompt, list(choices.values()))
            loads[name] = replace(loads[name], assigned=loads[name].assigned + stream.num_unfinished)
            if self._index is not None and len(loads) > 1:
                stream.peer = find_peer(self._index, prompt, name, loads)
            self.submit(stream)

    def _fits(self, stream: Stream, name: str) -> bool:
        """Whether the worker generates the text that the beginning of the stream is part of, as far as it is known."""
        welcome = self._targets[name].welcome
        return welcome is not None and welcome.fingerprint in (None, stream.fingerprint)

    def submit(self, stream: Stream) -> None:
        """Send the stream to the worker that it is assigned or pinned to."""
        target = self._targets[stream.pinned or stream.worker or ""]
        assert target.welcome is not None
        stream.attempt, stream.worker = next(self._attempts), target.name
        if not target.submit(stream.submission(target.welcome.epoch), stream):
            self._reassign(stream)

    def _reassign(self, stream: Stream) -> None:
        """Queue the stream for another worker. A pinned stream ends, and so does one that has lost too many workers."""
        self._detach(stream)
        stream.worker = None
        stream.num_lost += 1
        if stream.pinned is not None:
            self._remove(stream)
        elif stream.num_deaths >= MAX_DEATHS:
            self._end_suspect(stream)
        elif stream.num_lost > MAX_LOST_WORKERS:
            self._remove(stream)
            text = f"the request failed on {stream.num_lost} workers in a row without an output"
            self._notify(stream, EngineClosed(text))
        else:
            self.num_continued += 1
            self._unassigned.append(stream)

    def _end_suspect(self, stream: Stream) -> None:
        """End a request that workers die of, and refuse it from now on."""
        self._remove(stream)
        self._quarantine[_digest(stream.request)] = None
        if len(self._quarantine) > MAX_QUARANTINED:
            del self._quarantine[next(iter(self._quarantine))]
        logger.error("request %s is refused: %d workers died of it", stream.request.id, MAX_DEATHS)
        text = f"{MAX_DEATHS} workers died while they started this request, which is refused: change its parameters"
        self._notify(stream, GenerationFailed(text))

    def _detach(self, stream: Stream) -> None:
        target = self._targets.get(stream.worker or "")
        if target is not None:
            target.streams.pop(stream.attempt, None)
        self._router.ended(stream.request.id)

    def _remove(self, stream: Stream) -> None:
        self._detach(stream)
        if stream in self._unassigned:
            self._unassigned.remove(stream)
        self._streams.pop(stream.request.id, None)
        with self._lock:
            self._ids.discard(stream.request.id)

    def _notify(self, stream: Stream, event: OutputEvent) -> None:
        try:
            stream.listener(event)
        except Exception:
            logger.exception("a listener raised; its request is cancelled")
            self.cancel(stream.request.id)


def _digest(request: Request) -> int:
    """Equal for requests that differ in id and seed only."""
    sampling = replace(request.sampling, seed=0)
    return hash((request.prompt_ids, repr(sampling), repr(request.speculation)))
