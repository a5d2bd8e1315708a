"""Where target workers have prompts computed: a prefill worker's engine, and what becomes of their cache."""

import itertools
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from queue import SimpleQueue

import torch

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import EngineClosed, InvalidRequest, PacelineError
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import SpeculationParams
from paceline.core.worker_status import HandoffCounts
from paceline.engine.hooks.handoff_plan import CacheLayout, HandoffPlan
from paceline.engine.loop import EngineLoop
from paceline.kernels.layout import BLOCK_SIZE
from paceline.runtime.handoff.export_job import ExportJob
from paceline.runtime.transfer.server import TransferServer
from paceline.runtime.wire.stream_messages import Prefill, PrefillStarted
from paceline.runtime.wire.transport import Peer

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
"""Copied from the cache and not yet fetched, of all prompts together; one may always be more."""
SPARE_BLOCKS = 16
"""Of the cache, for whoever else wants something generated here: canaries."""


class Busy(PacelineError):
    """No more prompts at the moment: compute it yourself."""


class PrefillDesk:
    """One thread, the worker's, calls everything; the engine computes on its own, and a third thread copies what is ready."""

    def __init__(
        self, loop: EngineLoop, server: TransferServer, clock: Clock | None = None, computes: bool = True
    ) -> None:
        """Unless it `computes`, nothing is given but what is cached: a target's desk, for other targets."""
        engine = loop.engine
        self._loop = loop
        self._engine = engine
        self._server = server
        self._computes = computes
        self._clock = clock or WallClock()
        self._layout = CacheLayout.of(engine.runner)
        self._exports = engine.exports
        self._jobs: dict[tuple[Peer, int], ExportJob] = {}
        self._since: dict[tuple[Peer, int], float] = {}
        self._numbers = itertools.count()
        self._done = self._failed = self._tokens = self._bytes = 0
        self._seconds = 0.0
        self._work: SimpleQueue[tuple[ExportJob, Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._copy, name="paceline-exports", daemon=True)
        self._thread.start()

    def ask(self, peer: Peer, message: Prefill) -> PrefillStarted:
        """Begin to compute. Raises `Busy`, or `InvalidRequest` for what will never be computed here."""
        plan = self._plan(message)
        engine, pool = self._engine, self._engine.scheduler.tables.pool
        jobs = self._jobs.values()
        blocks = sum(job.plan.end + 1 for job in jobs)
        if jobs and sum(job.num_bytes for job in jobs) > MAX_BYTES:
            raise Busy(f"{len(jobs)} prompts are waiting to be fetched")
        if blocks + plan.end + 1 > pool.num_blocks - SPARE_BLOCKS:
            raise Busy(f"the cache is full of {len(jobs)} other prompts")
        request = Request(
            id=f"prefill-{next(self._numbers)}",
            prompt_ids=tuple(message.ids),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True),
            speculation=SpeculationParams(enabled=False),
            cache_salt=message.salt,
            max_cached_tokens=plan.first_state if plan.state_layers else None,  # hidden states are not cached
        )
        engine.validate(request)
        self.withdraw(peer, message.attempt)
        job = ExportJob(peer, message.attempt, request.id, plan, engine.runner, self._later)
        job.handle = self._server.offer(job.transfer)
        self._jobs[peer, message.attempt] = job
        self._since[peer, message.attempt] = self._clock.now()
        self._loop.call(lambda: self._begin(job, request))
        return PrefillStarted(message.attempt, job.handle)

    def withdraw(self, peer: Peer, attempt: int) -> None:
        """Whoever asked has it, or no longer wants it. What is unknown is no error."""
        job = self._jobs.pop((peer, attempt), None)
        if job is None:
            return
        since = self._since.pop((peer, attempt))
        if job.num_missing:
            self._failed += 1
        else:
            self._done += 1
            self._tokens += (job.plan.end - job.plan.first) * BLOCK_SIZE
            self._bytes += job.num_bytes
            self._seconds += self._clock.now() - since
        self._end(job)

    def drop(self, peer: Peer) -> None:
        """It is gone."""
        for key in [key for key in self._jobs if key[0] == peer]:
            self.withdraw(*key)

    def record(self) -> HandoffCounts:
        return HandoffCounts(self._done, self._failed, self._tokens, self._bytes, self._seconds)

    def close(self) -> None:
        """After the engine has stopped."""
        self._work.put(None)
        self._thread.join()
        self._server.close()

    def _plan(self, message: Prefill) -> HandoffPlan:
        if message.layout != self._layout.name:
            raise InvalidRequest(
                f"this worker's cache is {self._layout.name} and the asker's {message.layout}: give prefill and target "
                "pools the same model, dtype, quantization and kv_dtype"
            )
        if len(message.ids) % BLOCK_SIZE:
            raise InvalidRequest(f"{len(message.ids)} tokens are no whole blocks of {BLOCK_SIZE}", field="ids")
        layers = tuple(message.state_layers)
        try:
            return HandoffPlan(self._layout, message.first, len(message.ids) // BLOCK_SIZE, layers, message.state_rows)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def _begin(self, job: ExportJob, request: Request) -> None:  # on the engine's thread
        if job.is_over:
            return
        if not self._computes:
            if not self._exports.give(request.id, job.plan, job, request.prompt_ids, request.cache_salt):
                job.transfer.abort("it is not cached any more")
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
        self._work.put((job, lambda: None))

    def _later(self, job: ExportJob, work: Callable[[], None]) -> None:
        self._work.put((job, work))

    def _copy(self) -> None:
        """Nothing is read from blocks that were given back: that they may be is said from here, after the last read."""
        device = self._engine.runner.device
        on_its_own = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
        with on_its_own:
            while (item := self._work.get()) is not None:
                job, work = item
                try:
                    if not job.is_over:
                        work()
                except Exception as error:
                    logger.exception("a prompt could not be handed over")
                    job.transfer.abort(f"it could not be read from the cache: {error!r}")
                    job.is_over = True
                if job.is_over or not job.num_missing:
                    self._call(lambda id=job.request_id: self._exports.end(id))  # type: ignore[misc]

    def _call(self, command: Callable[[], None]) -> None:
        with suppress(EngineClosed):
            self._loop.call(command)
