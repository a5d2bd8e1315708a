"""Hand-off of long prompts in a target worker: prefill workers compute them, and peers send what they have cached.

Blocks are fetched while they are computed and passed to the engine. After any failure this worker computes the prompt itself,
and the text is the same.
"""

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from paceline.core.clock import Clock, WallClock
from paceline.core.cluster_config import HANDOFF_THRESHOLD, HealthConfig
from paceline.core.errors import EngineClosed, PacelineError
from paceline.core.output import OutputEvent, OutputListener, StepOutput
from paceline.core.request import Request, ValidatedRequest
from paceline.core.sequence import BLOCK_SIZE
from paceline.core.status import HandoffCounts
from paceline.engine import EngineLoop
from paceline.engine.hooks import KvImports
from paceline.policy.routing.handoff import HandoffPolicy, LocalPrompt, PrefillLoad
from paceline.policy.routing.kv_index import PeerHint
from paceline.policy.routing.rates import MIN_TOKENS
from paceline.speculation.proposers.eagle import SEQUENCE_ROWS
from paceline.transfer import DeviceMemory, device_memory
from paceline.wire.gateway_messages import WorkerAddress
from paceline.wire.keys import KeyPair
from paceline.worker.handoff.connections import MAX_PROMPTS, PrefillConnections
from paceline.worker.handoff.memory import PeerCaches, RemotePrompt

logger = logging.getLogger(__name__)

PEER_SECONDS, MIN_PEER_SECONDS = 5.0, 0.25
"""Timeout for a peer's blocks. It is the time to compute them here, but at least `MIN_PEER_SECONDS`. If that time is unknown,
it is `PEER_SECONDS`."""


class Handoffs:
    """`submit` and `cancel` like those of `EngineLoop`, from any thread."""

    def __init__(
        self,
        loop: EngineLoop,
        own: KeyPair | None = None,
        threshold: int = HANDOFF_THRESHOLD,
        channels: Sequence[str] | None = None,
        health: HealthConfig | None = None,
        clock: Clock | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """`memory` is that of the engine's device, if blocks may be copied from other workers' memory. If it is None,
        `device_memory` decides."""
        engine = loop.engine
        self._loop = loop
        self._engine = engine
        self._imports = engine.hooks.get(KvImports)
        self._min_tokens = min(threshold, MIN_TOKENS)
        self._clock = clock or WallClock()
        self._lock = threading.Lock()  # guards what follows
        self._policy = HandoffPolicy(threshold)
        self._pending: dict[str, RemotePrompt] = {}
        """Requests that are not in the engine yet."""
        self._counts = HandoffCounts()
        caches = PeerCaches(engine.runner, memory or device_memory(engine.runner.device, channels))
        health = health or HealthConfig()
        self._connections = PrefillConnections(self._finish, own, channels, health, self._clock, caches)

    def submit(self, request: ValidatedRequest, listener: OutputListener, peer: PeerHint | None = None) -> None:
        """Start a request. This worker or a prefill worker computes its prompt, or `peer` sends it."""
        committed = request.committed[request.unfinished[0]] if request.committed else None
        prompt = RemotePrompt(request, listener, (*request.prompt_ids, *(committed or ())), peer)
        is_scored = request.sampling.prompt_logprobs is not None  # a hand-off sends no logits
        if is_scored or len(prompt.ids) <= self._min_tokens or not (self._connections.loads or peer):
            self._loop.submit(request, listener)
            return
        with self._lock:
            self._pending[request.id] = prompt
        self._loop.call(lambda: self._place(prompt))

    def cancel(self, request_id: str) -> None:
        """Like `EngineLoop.cancel`, also for a prompt in hand-off."""
        with self._lock:
            prompt = self._pending.pop(request_id, None)
        if prompt is None:
            self._loop.cancel(request_id)
        else:
            prompt.fail("")
            self._connections.wake()

    def set_workers(self, workers: Sequence[WorkerAddress], peers: Sequence[WorkerAddress] = ()) -> None:
        """Replace the prefill workers, and the peers that send cached blocks."""
        self._connections.set_workers(workers, peers)

    def counts(self) -> HandoffCounts:
        with self._lock:
            return self._counts

    def close(self) -> None:
        """Stop all hand-offs. Call it before the engine is closed."""
        with self._lock:
            pending = list(self._pending.values())
        for prompt in pending:
            prompt.fail("this worker is stopping")
        self._connections.close()

    def _place(self, prompt: RemotePrompt) -> None:
        """Decide where the prompt is computed. On the engine's thread."""
        if self._request_from_peer(prompt):
            return
        request, scheduler = prompt.request, self._engine.scheduler
        uncached = len(prompt.ids) - self._imports.cached(prompt.ids, request.cache_salt)
        local = LocalPrompt(
            uncached,
            scheduler.num_prompt_tokens,
            sum(s.num_uncomputed == 1 for s in scheduler.running),
            len(prompt.ids),
        )
        with self._lock:
            inflight = [prompt for prompt in self._pending.values() if prompt.incoming is not None]
            loads = [_add_inflight(load, inflight) for load in self._connections.loads]
            now = self._clock.now()
            chosen = self._policy.choose(local, loads, now) if len(inflight) < MAX_PROMPTS else None
        if chosen is not None and not prompt.stop.is_set():
            layers = self._state_layers(request)
            rows = SEQUENCE_ROWS if layers else 0
            prompt.incoming = self._imports.reserve(request.id, prompt.ids, request.cache_salt, layers, rows)
        if chosen is None or prompt.incoming is None:
            self._submit(prompt, self._measure(prompt.listener, local.queued + uncached))
            return
        prompt.worker = chosen.worker
        prompt.tokens = uncached + next(load.queued for load in loads if load.name == chosen.worker)
        prompt.requested = self._clock.now()
        prompt.deadline = prompt.requested + chosen.timeout
        self._connections.request(prompt)

    def _request_from_peer(self, prompt: RemotePrompt) -> bool:
        """Request a peer's cached blocks if that is faster than computing them. On the engine's thread."""
        peer = prompt.peer
        load = None if peer is None else self._connections.peer(peer.worker)
        if peer is None or load is None or prompt.stop.is_set():
            return False
        request, ids = prompt.request, prompt.ids[: peer.tokens + 1]
        uncached = len(ids) - 1 - self._imports.cached(ids, request.cache_salt)
        with self._lock:
            num_inflight = sum(prompt.incoming is not None for prompt in self._pending.values())
            # Without `running`: a peer's blocks delay no sequence that decodes here
            local, now = LocalPrompt(uncached, 0, 0), self._clock.now()
            chosen = self._policy.choose(local, [load], now) if num_inflight < MAX_PROMPTS else None
            seconds = self._policy.local_seconds(uncached, now)
        if chosen is None:
            return False
        prompt.incoming = self._imports.reserve(request.id, ids, request.cache_salt)
        if prompt.incoming is None:
            return False
        prompt.worker, prompt.tokens, prompt.requested = peer.worker, uncached, self._clock.now()
        prompt.deadline = prompt.requested + (PEER_SECONDS if seconds is None else max(MIN_PEER_SECONDS, seconds))
        self._connections.request(prompt)
        return True

    def _finish(self, prompt: RemotePrompt, num_blocks: int) -> None:
        """Count a hand-off that ended with this many complete blocks. On the thread of the connections."""
        assert prompt.incoming is not None
        plan, now = prompt.incoming.plan, self._clock.now()
        seconds = now - prompt.requested
        with self._lock:
            old = self._counts
            if num_blocks == plan.end:
                self._policy.add_handoff(prompt.worker, prompt.tokens, seconds, now)
                tokens = (plan.end - plan.first) * BLOCK_SIZE
                self._counts = HandoffCounts(
                    done=old.done + 1,
                    failed=old.failed,
                    tokens=old.tokens + tokens,
                    bytes=old.bytes + plan.num_bytes,
                    seconds=old.seconds + seconds,
                    peer_tokens=old.peer_tokens + tokens * prompt.is_from_peer,
                    in_place_bytes=old.in_place_bytes + plan.num_bytes * plan.in_place,
                )
            elif prompt.reason:
                logger.warning(
                    "hand-off by %s failed: %s; this worker computes the prompt", prompt.worker, prompt.reason
                )
                self._policy.add_failure(prompt.worker, now)
                self._counts = replace(old, failed=old.failed + 1)
        with suppress(EngineClosed):
            self._loop.call(lambda: self._publish(prompt, num_blocks))

    def _publish(self, prompt: RemotePrompt, num_blocks: int) -> None:
        """Make the blocks a prefix hit and submit the request. On the engine's thread."""
        assert prompt.incoming is not None
        self._imports.publish(prompt.incoming, num_blocks)
        num_cached, listener = prompt.incoming.num_cached, prompt.listener
        if prompt.is_from_peer:
            self._submit(prompt, listener)
            return

        def listen(event: OutputEvent) -> None:
            """Report only the tokens that were cached before the hand-off."""
            if isinstance(event, StepOutput):
                event = replace(event, num_cached=min(event.num_cached, num_cached))
            listener(event)

        self._submit(prompt, listen)

    def _submit(self, prompt: RemotePrompt, listener: OutputListener) -> None:
        """Pass the request to the engine, unless it was cancelled. On the engine's thread."""
        request = prompt.request
        try:
            with self._lock:  # `cancel` finds the request either here or in the engine
                is_wanted = self._pending.pop(request.id, None) is not None
                if is_wanted:
                    self._loop.submit(request, listener)
        except PacelineError as error:
            is_wanted = False
            prompt.listener(error)
        if not is_wanted:
            self._imports.request_cancelled(request.id)

    def _measure(self, listener: OutputListener, tokens: int) -> OutputListener:
        """A listener that also measures the time until `tokens` are computed here."""
        since, first = self._clock.now(), iter((True,))

        def listen(event: OutputEvent) -> None:
            if isinstance(event, StepOutput) and next(first, False):
                with self._lock:
                    now = self._clock.now()
                    self._policy.add_local(tokens, now - since, now)
            listener(event)

        return listen

    def _state_layers(self, request: Request) -> tuple[int, ...]:
        """Layers whose hidden states of the prompt the request's proposer needs."""
        speculator, method = self._engine.speculator, self._engine.validator.method(request.speculation)
        hidden = speculator.proposers[method].traits.hidden
        is_drafted = speculator.enabled and request.speculation.enabled
        return hidden.layers if hidden is not None and not hidden.last and is_drafted else ()


def _add_inflight(load: PrefillLoad, inflight: Sequence[RemotePrompt]) -> PrefillLoad:
    """The load with prompts that were sent after the worker's last heartbeat."""
    own = sum(len(prompt.ids) for prompt in inflight if prompt.worker == load.name)
    return replace(load, queued=max(load.queued, own))
