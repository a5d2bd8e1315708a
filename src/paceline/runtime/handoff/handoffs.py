"""A target worker's way to have long prompts computed by prefill workers: asked for, fetched while they are computed, and
handed to the engine. Whatever goes wrong, the prompt is computed here, and the text is the same."""

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from paceline.cluster.routing.handoff import HandoffPolicy, LocalPrompt, PrefillLoad
from paceline.cluster.routing.kv_index import PeerHint
from paceline.cluster.routing.worker_rates import MIN_TOKENS
from paceline.core.clock import Clock, WallClock
from paceline.core.cluster_config import HANDOFF_THRESHOLD, HealthConfig
from paceline.core.errors import EngineClosed, PacelineError
from paceline.core.output import OutputEvent, OutputListener, StepOutput
from paceline.core.request import Request
from paceline.core.worker_status import HandoffCounts
from paceline.engine.loop import EngineLoop
from paceline.kernels.layout import BLOCK_SIZE
from paceline.runtime.handoff.pending_prompt import PendingPrompt
from paceline.runtime.handoff.prefill_connections import MAX_PROMPTS, PrefillLines
from paceline.runtime.wire.keys import KeyPair
from paceline.runtime.wire.stream_messages import WorkerAddress
from paceline.speculation.proposers.pending import SEQUENCE_ROWS

logger = logging.getLogger(__name__)

PEER_SECONDS, LEAST_PEER_SECONDS = 5.0, 0.25
"""How long to wait for a peer's blocks: as long as computing them would take, or the first where that is not known."""


class Handoffs:
    """`submit` and `cancel` are those of an `EngineLoop`, from any thread."""

    def __init__(
        self,
        loop: EngineLoop,
        own: KeyPair | None = None,
        threshold: int = HANDOFF_THRESHOLD,
        kinds: Sequence[str] | None = None,
        health: HealthConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        engine = loop.engine
        self._loop = loop
        self._engine = engine
        self._imports = engine.imports
        self._shortest = min(threshold, MIN_TOKENS)
        self._clock = clock or WallClock()
        self._lock = threading.Lock()  # guards what follows
        self._policy = HandoffPolicy(self._clock, threshold)
        self._pending: dict[str, PendingPrompt] = {}
        """Requests that are not in the engine yet."""
        self._record = HandoffCounts()
        self._lines = PrefillLines(self._over, own, kinds, health or HealthConfig(), self._clock)

    def submit(self, request: Request, listener: OutputListener, peer: PeerHint | None = None) -> None:
        """Start a request, its prompt computed here or elsewhere, or taken from `peer`. What is wrong with it is raised here
        and now."""
        self._engine.validate(request)
        committed = request.committed[request.unfinished[0]] if request.committed else None
        pending = PendingPrompt(request, listener, (*request.prompt_ids, *(committed or ())), peer)
        if len(pending.ids) <= self._shortest or not (self._lines.loads or peer):
            self._loop.submit(request, listener)
            return
        with self._lock:
            self._pending[request.id] = pending
        self._loop.call(lambda: self._consider(pending))

    def cancel(self, request_id: str) -> None:
        """As `EngineLoop.cancel`, wherever its prompt is."""
        with self._lock:
            pending = self._pending.pop(request_id, None)
        if pending is None:
            self._loop.cancel(request_id)
        else:
            pending.fail("")
            self._lines.wake()

    def set_workers(self, workers: Sequence[WorkerAddress], peers: Sequence[WorkerAddress] = ()) -> None:
        """Use these prefill workers and no others; `peers` are asked for what they have cached."""
        self._lines.set_workers(workers, peers)

    def record(self) -> HandoffCounts:
        with self._lock:
            return self._record

    def close(self) -> None:
        """Before the engine is closed. What is under way is given up."""
        with self._lock:
            pending = list(self._pending.values())
        for one in pending:
            one.fail("this worker is stopping")
        self._lines.close()

    def _take_from_peer(self, pending: PendingPrompt) -> bool:
        """Ask a peer for what it has cached, if that is quicker than computing it. On the engine's thread."""
        peer = pending.peer
        load = None if peer is None else self._lines.peer(peer.worker)
        if peer is None or load is None or pending.stop.is_set():
            return False
        request, ids = pending.request, pending.ids[: peer.tokens + 1]
        uncached = len(ids) - 1 - self._imports.cached(ids, request.cache_salt)
        with self._lock:
            num_under_way = sum(one.arrival is not None for one in self._pending.values())
            # Those who decode here wait for nobody: a peer's blocks come by themselves
            chosen = self._policy.choose(LocalPrompt(uncached, 0, 0), [load]) if num_under_way < MAX_PROMPTS else None
            seconds = self._policy.local_seconds(uncached)
        if chosen is None:
            return False
        pending.arrival = self._imports.reserve(request.id, ids, request.cache_salt)
        if pending.arrival is None:
            return False
        pending.worker, pending.tokens, pending.asked = peer.worker, uncached, self._clock.now()
        pending.deadline = pending.asked + (PEER_SECONDS if seconds is None else max(LEAST_PEER_SECONDS, seconds))
        self._lines.ask(pending)
        return True

    def _consider(self, pending: PendingPrompt) -> None:
        """Here or elsewhere? On the engine's thread."""
        if self._take_from_peer(pending):
            return
        request, scheduler = pending.request, self._engine.scheduler
        uncached = len(pending.ids) - self._imports.cached(pending.ids, request.cache_salt)
        here = LocalPrompt(
            uncached,
            scheduler.num_prompt_tokens,
            sum(s.num_uncomputed == 1 for s in scheduler.running),
            len(pending.ids),
        )
        with self._lock:
            under_way = [one for one in self._pending.values() if one.arrival is not None]
            loads = [_with_own(load, under_way) for load in self._lines.loads]
            chosen = self._policy.choose(here, loads) if len(under_way) < MAX_PROMPTS else None
        if chosen is not None and not pending.stop.is_set():
            layers = self._state_layers(request)
            rows = SEQUENCE_ROWS if layers else 0
            pending.arrival = self._imports.reserve(request.id, pending.ids, request.cache_salt, layers, rows)
        if chosen is None or pending.arrival is None:
            self._go_on(pending, self._timed(pending.listener, here.queued + uncached))
            return
        pending.worker = chosen.worker
        pending.tokens = uncached + next(load.queued for load in loads if load.name == chosen.worker)
        pending.asked = self._clock.now()
        pending.deadline = pending.asked + chosen.timeout
        self._lines.ask(pending)

    def _over(self, pending: PendingPrompt, num_blocks: int) -> None:
        """On the thread of the lines."""
        assert pending.arrival is not None
        plan, seconds = pending.arrival.plan, self._clock.now() - pending.asked
        with self._lock:
            old = self._record
            if num_blocks == plan.end:
                self._policy.add_handoff(pending.worker, pending.tokens, seconds)
                tokens = (plan.end - plan.first) * BLOCK_SIZE
                self._record = HandoffCounts(
                    done=old.done + 1,
                    failed=old.failed,
                    tokens=old.tokens + tokens,
                    bytes=old.bytes + sum(plan.size(part) for part in plan.parts()),
                    seconds=old.seconds + seconds,
                    peer_tokens=old.peer_tokens + tokens * pending.is_from_peer,
                )
            elif pending.reason:
                logger.warning("%s handed no prompt over: %s; it is computed here", pending.worker, pending.reason)
                self._policy.add_failure(pending.worker)
                self._record = replace(old, failed=old.failed + 1)
        with suppress(EngineClosed):
            self._loop.call(lambda: self._land(pending, num_blocks))

    def _land(self, pending: PendingPrompt, num_blocks: int) -> None:
        """On the engine's thread."""
        assert pending.arrival is not None
        self._imports.land(pending.arrival, num_blocks)
        num_cached, listener = pending.arrival.num_cached, pending.listener
        if pending.is_from_peer:
            self._go_on(pending, listener)
            return

        def listen(event: OutputEvent) -> None:
            """What was handed over had not been cached here."""
            if isinstance(event, StepOutput):
                event = replace(event, num_cached=min(event.num_cached, num_cached))
            listener(event)

        self._go_on(pending, listen)

    def _go_on(self, pending: PendingPrompt, listener: OutputListener) -> None:
        """To the engine, unless it was cancelled. On the engine's thread."""
        request = pending.request
        try:
            with self._lock:  # so that whoever cancels finds it either here or there
                is_wanted = self._pending.pop(request.id, None) is not None
                if is_wanted:
                    self._loop.submit(request, listener)
        except PacelineError as error:
            is_wanted = False
            pending.listener(error)
        if not is_wanted:
            self._imports.request_cancelled(request.id)

    def _timed(self, listener: OutputListener, tokens: int) -> OutputListener:
        """Learns how long it takes here until `tokens` are computed."""
        since, first = self._clock.now(), iter((True,))

        def listen(event: OutputEvent) -> None:
            if isinstance(event, StepOutput) and next(first, False):
                with self._lock:
                    self._policy.add_local(tokens, self._clock.now() - since)
            listener(event)

        return listen

    def _state_layers(self, request: Request) -> tuple[int, ...]:
        """The hidden states of its prompt that its draft will want."""
        speculator, method = self._engine.speculator, self._engine.validator.method(request.speculation)
        wants = speculator.proposers[method].traits.hidden
        is_drafted = speculator.enabled and request.speculation.enabled
        return wants.layers if wants is not None and not wants.last and is_drafted else ()


def _with_own(load: PrefillLoad, under_way: Sequence[PendingPrompt]) -> PrefillLoad:
    """What was sent there since it last said how busy it is counts too."""
    own = sum(len(one.ids) for one in under_way if one.worker == load.name)
    return replace(load, queued=max(load.queued, own))
