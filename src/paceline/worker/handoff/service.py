"""The service that computes prompts for target workers, or sends cached ones, and offers their KV blocks as transfers."""

import itertools
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from queue import SimpleQueue

import torch

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import EngineClosed, InvalidRequest, PacelineError
from paceline.core.request import Request, SamplingParams, SpeculationParams, ValidatedRequest
from paceline.core.sequence import BLOCK_SIZE
from paceline.core.status import HandoffCounts
from paceline.engine import EngineLoop
from paceline.engine.hooks import CacheLayout, HandoffPlan, KvExports
from paceline.models.blocks import load_kernels
from paceline.transfer import DeviceMemory, TransferServer
from paceline.wire.gateway_messages import Prefill, PrefillStarted
from paceline.wire.transfer_messages import MemoryRegion
from paceline.wire.transport import Peer
from paceline.worker.handoff.export import ExportJob, StagingPool
from paceline.worker.handoff.memory import share_cache

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
"""Bytes copied from the cache and not fetched yet, over all prompts. A single prompt may exceed it."""
RESERVED_BLOCKS = 16
"""Blocks of the cache kept for canary requests."""


class PrefillBusy(PacelineError):
    """The worker accepts no more prompts for now. The target computes the prompt itself."""


class PrefillService:
    """Called by the worker's thread only. The engine computes on its own thread, and a third thread copies what is ready."""

    def __init__(
        self,
        loop: EngineLoop,
        server: TransferServer,
        clock: Clock | None = None,
        computes: bool = True,
        memory: DeviceMemory | None = None,
    ) -> None:
        """If `computes` is False, the service sends cached blocks only, as a target does for its peers. `memory` is that of the
        engine's device, if targets may read blocks in place."""
        engine = loop.engine
        self._loop = loop
        self._engine = engine
        self._server = server
        self.computes = computes
        """Whether it computes prompts. Otherwise it sends cached blocks only."""
        self._clock = clock or WallClock()
        self._layout = CacheLayout.of(engine.runner)
        self._exports = engine.hooks.get(KvExports)
        self._cache = share_cache(engine.runner, memory)
        """The cache in device memory. Empty if blocks are sent as bytes."""
        self._jobs: dict[tuple[Peer, int], ExportJob] = {}
        self._started: dict[tuple[Peer, int], float] = {}
        self._numbers = itertools.count()
        self._done = self._failed = self._tokens = self._bytes = self._in_place_bytes = 0
        self._seconds = 0.0
        self._pool = StagingPool(engine.runner.device)
        self._copies: SimpleQueue[tuple[ExportJob, Callable[[], None] | None] | None] = SimpleQueue()
        """Copies to run. An entry without a copy means that the job has ended."""
        self._thread = threading.Thread(target=self._run_copies, name="paceline-exports", daemon=True)
        self._thread.start()

    def start(self, peer: Peer, message: Prefill) -> PrefillStarted:
        """Start a prompt. Raises `PrefillBusy`, or `InvalidRequest` for a prompt that this worker can never compute."""
        plan = self._plan(message)
        engine, pool = self._engine, self._engine.scheduler.tables.pool
        jobs = self._jobs.values()
        blocks = sum(job.plan.end + 1 for job in jobs)
        if jobs and sum(job.num_staged_bytes for job in jobs) > MAX_BYTES:
            raise PrefillBusy(f"{len(jobs)} prompts are waiting to be fetched")
        if blocks + plan.end + 1 > pool.num_blocks - RESERVED_BLOCKS:
            raise PrefillBusy(f"the cache is full of {len(jobs)} other prompts")
        request = Request(
            id=f"prefill-{next(self._numbers)}",
            prompt_ids=tuple(message.ids),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True),
            speculation=SpeculationParams(enabled=False),
            cache_salt=message.salt,
            max_cached_tokens=plan.first_state if plan.state_layers else None,  # hidden states are not cached
        )
        validated = engine.validate(request)
        self.cancel(peer, message.attempt)
        job = ExportJob(peer, message.attempt, request.id, plan, engine.runner, self._defer, self._pool)
        job.handle = self._server.offer(job.transfer)
        self._jobs[peer, message.attempt] = job
        self._started[peer, message.attempt] = self._clock.now()
        self._loop.call(lambda: self._begin(job, validated))
        return PrefillStarted(message.attempt, job.handle, self._cache if plan.in_place else [])

    def cancel(self, peer: Peer, attempt: int) -> None:
        """End a job, because the target has fetched the prompt or no longer needs it. An unknown attempt is no error."""
        job = self._jobs.pop((peer, attempt), None)
        if job is None:
            return
        started = self._started.pop((peer, attempt))
        if job.num_missing:
            self._failed += 1
        else:
            self._done += 1
            self._tokens += (job.plan.end - job.plan.first) * BLOCK_SIZE
            self._bytes += job.plan.num_bytes
            self._in_place_bytes += job.plan.num_bytes * job.plan.in_place
            self._seconds += self._clock.now() - started
        self._end(job)

    def cancel_all(self, peer: Peer) -> None:
        """End all jobs of a target that is gone."""
        for key in [key for key in self._jobs if key[0] == peer]:
            self.cancel(*key)

    @property
    def num_jobs(self) -> int:
        """Prompts that are computed, or not fetched yet."""
        return len(self._jobs)

    def counts(self) -> HandoffCounts:
        done, failed, tokens, sent = self._done, self._failed, self._tokens, self._bytes
        return HandoffCounts(done, failed, tokens, sent, self._seconds, in_place_bytes=self._in_place_bytes)

    @property
    def cache_memory(self) -> MemoryRegion | None:
        """Device memory of the cache that a target tests. None if blocks are sent as bytes."""
        return self._cache[0] if self._cache else None

    def close(self) -> None:
        """Call it after the engine has stopped."""
        self._copies.put(None)
        self._thread.join()
        self._server.close()

    def _plan(self, message: Prefill) -> HandoffPlan:
        if message.layout != self._layout.name:
            raise InvalidRequest(
                f"this worker's cache is {self._layout.name} and the target's {message.layout}: give prefill and target "
                "pools the same model, dtype, quantization, activations and kv_dtype"
            )
        if len(message.ids) % BLOCK_SIZE:
            raise InvalidRequest(f"{len(message.ids)} tokens are no whole blocks of {BLOCK_SIZE}", field="ids")
        if message.in_place and not self._cache:
            raise InvalidRequest("this worker's cache cannot be read in place", field="in_place")
        layers, end = tuple(message.state_layers), len(message.ids) // BLOCK_SIZE
        try:
            return HandoffPlan(self._layout, message.first, end, layers, message.state_rows, message.in_place)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def _begin(self, job: ExportJob, request: ValidatedRequest) -> None:
        """On the engine's thread."""
        if job.is_over:
            return
        if not self.computes:
            if not self._exports.export_cached(request.id, job.plan, job, request.prompt_ids, request.cache_salt):
                job.transfer.abort("it is no longer cached")
            return
        self._exports.begin(request.id, job.plan, job)
        try:
            self._engine.add(request)
        except PacelineError as error:
            self._exports.end(request.id)
            job.transfer.abort(str(error))

    def _end(self, job: ExportJob) -> None:
        job.is_over = True
        assert job.handle is not None
        self._server.withdraw(job.handle)
        self._call(lambda: self._engine.cancel(job.request_id))
        self._copies.put((job, None))

    def _defer(self, job: ExportJob, copy: Callable[[], None]) -> None:
        self._copies.put((job, copy))

    def _run_copies(self) -> None:
        """Copy what is ready. This thread also releases the blocks of a job, after its last read of them."""
        device = self._engine.runner.device
        stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
        with stream:
            load_kernels(self._engine.runner)
            while (item := self._copies.get()) is not None:
                job, copy = item
                try:
                    if copy is None:
                        job.free()
                    elif not job.is_over:
                        copy()
                except Exception as error:
                    logger.exception("could not copy a prompt from the cache: its target computes it")
                    job.transfer.abort(f"it could not be read from the cache: {error!r}")
                    job.is_over = True
                if job.is_read:
                    self._call(lambda id=job.request_id: self._exports.end(id))  # type: ignore[misc]

    def _call(self, command: Callable[[], None]) -> None:
        with suppress(EngineClosed):
            self._loop.call(command)
