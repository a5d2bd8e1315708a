"""The loop: schedule -> propose -> verify -> commit."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.kv_events import CacheEvent
from paceline.core.output import StepOutput
from paceline.core.request import Request, ValidatedRequest
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import FinishReason, Sequence
from paceline.core.speculation import SpeculationFlags, SpeculationParams
from paceline.core.worker_status import EngineStatus, TrafficStatus
from paceline.engine.executors.executor import SequenceResult, StepExecutor, StepResult
from paceline.engine.executors.host import HostExecutor
from paceline.engine.executors.reason import GRAPH, HostReason
from paceline.engine.hooks.exports import Exports
from paceline.engine.hooks.hook import StepHook, StepHooks
from paceline.engine.hooks.imports import Imports
from paceline.engine.hooks.method_assignment import MethodAssignment
from paceline.engine.hooks.self_audit import SelfAudit
from paceline.engine.isolation.failures import RequestFailure, contained, is_isolated, owner_error
from paceline.engine.isolation.step_recovery import recover
from paceline.engine.isolation.step_watch import StepWatch
from paceline.engine.output import OutputProcessor
from paceline.engine.prompt_pacing import PromptPacer
from paceline.engine.schedule import Schedule
from paceline.engine.scheduler import Scheduler
from paceline.engine.sizing.memory_fit import MemoryFit
from paceline.engine.speculator import Speculator
from paceline.engine.validator import RequestValidator
from paceline.models.runner import ModelRunner
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.speculation.verification.grammar import Grammar

if TYPE_CHECKING:
    from paceline.engine.executors.graph.executor import GraphExecutor

logger = logging.getLogger(__name__)

FETCH_SECONDS = 0.005
"""Longest wait for blocks from lower tiers when no sequence can run; a new request may arrive meanwhile."""
REPORT_SECONDS = 0.25
"""Longest age of the traffic report of a busy engine."""
PROBE_ID = "paceline-probe"
"""Id of the request that shows whether the engine works at all."""


class Engine:
    """Generates for many sequences at once. Not thread-safe: one thread calls `add`, `cancel` and `step`.

    The scheduler decides which sequences run, the speculator what is drafted and how deep, verification which tokens are
    committed. Plain decoding is the same loop with empty drafts.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        speculator: Speculator,
        validator: RequestValidator,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
        graph: "GraphExecutor | None" = None,
        hooks: Seq[StepHook] = (),
        audit_fraction: float = 0.0,
        memory: MemoryFit | None = None,
        default_methods: Seq[str] = (),
    ) -> None:
        """`graph` runs steps as CUDA graphs; None on a CPU. `memory` is what the builder computed before it loaded anything.
        `default_methods`: two, of which a request that names none gets the faster one; empty: the validator's default."""
        self.runner = runner
        self.scheduler = scheduler
        self.speculator = speculator
        self.validator = validator
        self.tokenizer = tokenizer
        self.clock = clock or WallClock()
        self.graph = graph
        self.memory = memory
        self.imports = Imports(runner, scheduler, speculator, validator.limits.max_model_len)
        self.exports = Exports(runner, scheduler.tables)
        self.audit = SelfAudit(runner, scheduler.tables, audit_fraction)
        tiers = () if scheduler.tiers is None else (scheduler.tiers,)
        captures = () if graph is None else (graph.captures,)
        self.assignment = (
            MethodAssignment(default_methods, speculator.proposers, scheduler, validator, self.clock)
            if default_methods
            else None
        )
        """Chooses the method of requests that name none; None: the validator's default."""
        assignment = () if self.assignment is None else (self.assignment,)
        self.hooks = StepHooks((*assignment, self.audit, self.imports, self.exports, *tiers, *captures, *hooks))
        self.num_steps = 0
        """Steps begun; a busy engine whose count stands still is stuck."""
        self.num_generated = 0
        """Tokens committed."""
        self.executor_counts: Counter[str] = Counter()
        """Steps by executor: `graph`, or the `HostReason` why the host executor took it."""
        self.watch = StepWatch()
        self._pacer = PromptPacer()
        self._failures: list[RequestFailure] = []
        self._is_host_only = False
        """Whether a failed step is run again in parts, without graphs."""
        self._output = OutputProcessor(tokenizer)
        self._host = HostExecutor(runner, scheduler, speculator, self._output, self.clock, self.hooks)
        self._sequences: dict[str, list[Sequence]] = {}
        self._traffic: tuple[TrafficStatus, ...] = ()
        self._reported = 0.0
        for hook in self.hooks:
            hook.attach(self)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def seconds_to_spare(self) -> float:
        """How long the next step can wait for requests without letting the device run dry."""
        return self.graph.seconds_to_spare if self.graph is not None else 0.0

    def step(self) -> list[StepOutput]:
        """Run one step and return what it added to each sequence.

        A request that fails ends alone; `take_failures` returns it. The step raises only if the engine itself has failed.
        """
        self.num_steps += 1
        try:
            return self._step()
        except BaseException as error:
            return self._recover(error)

    def take_failures(self) -> list[RequestFailure]:
        """The requests that failed since the last call. They have ended."""
        failures, self._failures = self._failures, []
        return failures

    def _step(self) -> list[StepOutput]:
        """schedule -> propose -> verify -> commit. The graph executor runs one step ahead: its `collect` returns the step that
        was submitted before this one, or None if there was none."""
        for hook in self.hooks:
            hook.before_step()
        executor, schedule = self._schedule()
        if schedule is not None:
            # Slots of a graph step decode beside the prompts that it schedules
            num_slots = len(self.scheduler.running) if executor is self.graph else 0
            self.watch.begin(schedule.num_tokens + num_slots, monotonic())
            drafts = executor.propose(schedule)
            executor.submit(schedule, drafts)  # verify: may stay in flight
        result = executor.collect()
        outputs = self._commit(result) if result is not None else []
        # The tokens are committed: what fails from here on must not lose them
        with contained("the end of a step"):
            if result is not None:
                executor.prepare_next(result)
                self._report(result.times.drafted)
            for hook in self.hooks:
                hook.after_step()
        self.watch.end(monotonic())
        return outputs

    def _recover(self, error: BaseException) -> list[StepOutput]:
        """Continue after a failed step without the sequences that make it fail. Nothing of the step was committed."""
        sequences = [*self.scheduler.running, *self.scheduler.waiting]
        if not sequences or not is_isolated(error):
            raise error
        logger.error("a step of %d sequences failed; it is run again in parts", len(sequences), exc_info=error)
        if self.graph is not None:
            self.graph.release()
            for sequence in self.scheduler.running:
                self.scheduler.tables.shrink(sequence.id, sequence.num_computed)
            self.speculator.forget(self.scheduler.running)
        self._is_host_only = True
        try:
            found = recover(sequences, error, self._step_of)
            for sequence, cause in found.culprits:
                self._fail(sequence, cause)
            if found.culprits and not found.has_succeeded:
                self._probe(error)
        finally:
            self._is_host_only = False
            self.scheduler.restrict(None)
        return found.outputs

    def _step_of(self, sequences: Collection[Sequence]) -> tuple[bool, list[StepOutput]]:
        """A step of these sequences only: whether it computed anything, and its outputs."""
        self.scheduler.restrict(frozenset(sequence for sequence in sequences if not sequence.is_finished))
        self.num_steps += 1
        before = self.executor_counts.total()
        outputs = self._step()
        return self.executor_counts.total() > before, outputs

    def _probe(self, error: BaseException) -> None:
        """Raise `error` if the engine cannot compute a request that is known to be good."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        request = Request(PROBE_ID, (0,), sampling, SpeculationParams(enabled=False))
        failures, self._failures = self._failures, []
        try:
            self.add(request)
            _, outputs = self._step_of(self._sequences[PROBE_ID])
            works = bool(outputs) and not self._failures
        except Exception:
            works = False
        self._failures = failures
        if not works:
            raise error

    def _schedule(self) -> tuple[StepExecutor, Schedule | None]:
        """The executor of this step and what it computes; None: it has nothing to submit.

        The graph executor takes every step that it can. Before the host executor takes one, the step in flight is collected.
        """
        reason = HostReason.NO_GRAPHS
        if self.graph is not None and not self._is_host_only:
            planned = self.graph.schedule(can_prefill=not any(hook.needs_host_prefill for hook in self.hooks))
            if planned is None:
                return self.graph, None
            if not isinstance(planned, HostReason):
                self.executor_counts[GRAPH] += 1
                if planned.items:
                    self._start(planned)
                return self.graph, planned
            if self.graph.num_inflight:
                self.graph.drain()
                return self.graph, None
            if self.graph.is_loaded:
                self.graph.sync_to_host()
            self.graph.yield_to_host()
            reason = planned
        schedule = self.scheduler.schedule()
        self.speculator.forget(schedule.preempted)
        if not schedule.items:
            if self.scheduler.tiers is not None:
                self.scheduler.tiers.wait(FETCH_SECONDS)
            return self._host, None
        self.executor_counts[reason] += 1
        self._start(schedule)
        return self._host, schedule

    def _start(self, schedule: Schedule) -> None:
        """Note when its sequences run for the first time, and inform the hooks."""
        now = self.clock.now()
        for item in schedule.items:
            if item.sequence.started is None:
                item.sequence.started = now
        for hook in self.hooks:
            hook.scheduled(schedule)

    def _commit(self, result: StepResult) -> list[StepOutput]:
        """Append the verified tokens, free the blocks of rejected drafts, learn from the step, and return the new output."""
        for hook in self.hooks:
            hook.verified(result)
        outputs = []
        for one in result.sequences:
            if one.sequence.is_finished:  # another choice of its request failed in this step
                continue
            try:
                output = self._commit_one(one, result)
            except BaseException as error:
                self._fail(one.sequence, error)
            else:
                outputs += [] if output is None else [output]
        self.num_generated += sum(len(output.tokens) for output in outputs)
        with contained("learning from a step"):
            self.speculator.learn(result)
            if self.graph is None:
                self._pacer.observe(result.num_tokens, result.forward_seconds)
                self.scheduler.limit_prompts(self._pacer.max_tokens)
            for hook in self.hooks:
                hook.committed(result)
        return outputs

    def _commit_one(self, one: SequenceResult, result: StepResult) -> StepOutput | None:
        sequence, verdict, tables, output = one.sequence, one.verdict, self.scheduler.tables, None
        sequence.num_computed += one.num_tokens
        if verdict is not None:
            sequence.num_computed += len(verdict.path)
            if not result.is_graph:  # a step in flight still writes to the blocks reserved for it
                tables.shrink(sequence.id, sequence.num_computed)
            room = self.validator.remaining(sequence)
            output = self._output.append(sequence, verdict, one.num_nodes, room, one.logits, result.times)
        # Full blocks are shared even if the sequence ended: the next turn of a conversation starts with them.
        tables.publish(sequence.id, sequence.ids, min(sequence.num_computed, len(sequence.ids)))
        if sequence.finish_reason is not None:
            self._finish(sequence)
        return output

    def warm_up(self) -> None:
        """Compile kernels and capture the graphs that any traffic needs, before the first request."""
        if self.graph is None or self.has_work:
            return
        began = self.clock.now()
        self.graph.warm_up()
        logger.info("warm-up took %.1f s", self.clock.now() - began)

    @contextmanager
    def listening(self, hook: StepHook) -> Iterator[None]:
        """Call `hook` for every step until the context ends."""
        hook.attach(self)
        self.hooks.add(hook)
        try:
            yield
        finally:
            self.hooks.remove(hook)

    def validate(self, request: Request) -> ValidatedRequest:
        """The request with its seed, or `InvalidRequest`. Safe from any thread."""
        return self.validator.validate(request)

    def add(self, request: Request, grammar: Grammar | None = None) -> None:
        """Queue a request, which is validated if it was not before; its tokens come out of `step`.

        `grammar`: that of its JSON schema, if the caller has compiled it on another thread.
        """
        validated = self.validator.validate(request)
        grammar = grammar or self.validator.grammar(validated)
        if request.id in self._sequences:
            raise InvalidRequest(f"a request with id {request.id!r} is already running", field="id")
        sequences = self.validator.sequences(validated, self.clock.now())
        self._output.add(sequences, grammar)
        self._sequences[request.id] = sequences
        try:
            for sequence in sequences:
                self.scheduler.add(sequence)
                for hook in self.hooks:
                    hook.sequence_added(sequence, grammar)
        except BaseException as error:
            waiting = [sequence for sequence in sequences if sequence in self.scheduler.waiting]
            for sequence in sequences:
                if sequence not in waiting:
                    self._output.remove(sequence)
            self._sequences[request.id] = waiting
            self.cancel(request.id)
            raise owner_error(error) from error

    def cancel(self, request_id: str) -> None:
        """Free everything the request holds, now. Cancelling a finished or unknown request is not an error."""
        for sequence in self._sequences.pop(request_id, []):
            if not sequence.is_finished:
                sequence.finish_reason = FinishReason.CANCELLED
                self._finish(sequence)
        for hook in self.hooks:
            with contained("a hook"):
                hook.request_cancelled(request_id)

    @property
    def has_idle_work(self) -> bool:
        """Whether `use_idle_time` has something to do."""
        return any(hook.has_idle_work for hook in self.hooks)

    def use_idle_time(self) -> None:
        """Do a few milliseconds of background work while there are no requests."""
        for hook in self.hooks:
            hook.use_idle_time()

    def finish_idle_work(self) -> None:
        """Do all background work now, so that none of it falls into a measurement."""
        while self.has_idle_work:
            self.use_idle_time()

    def close(self) -> None:
        """Save the cache tiers that survive a restart and end the processes of other ranks. Safe to call twice."""
        try:
            for hook in self.hooks:
                hook.close()
        finally:
            self.runner.close()

    def listen(self, listener: Callable[[CacheEvent], None]) -> None:
        """Report every change of the cache, in all tiers, to `listener` from now on. It must not block."""
        if self.scheduler.tiers is None:
            self.scheduler.tables.pool.listen(listener)
        else:
            self.scheduler.tiers.listen(listener)

    def validate_flags(self, flags: SpeculationFlags) -> None:
        """Raise `InvalidRequest` if `set_flags` would. Safe from any thread."""
        self.validator.validate_flags(flags)

    def set_flags(self, flags: SpeculationFlags) -> None:
        """Change how to speculate from the next step on. Running sequences continue under the new flags."""
        self.validator.set_flags(flags)
        self.speculator.set_enabled(flags.enabled)
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            method = self._method_of(sequence)
            if method != sequence.method:
                self.speculator.set_method(sequence, method)
        self.speculator.prepare_next(self.scheduler.running)

    def snapshot(self) -> EngineStatus:
        """Counts as of now; traffic as of the last report of `step`. Safe from any thread, never blocks."""
        pool = self.scheduler.tables.pool
        return EngineStatus(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_used=pool.num_blocks - pool.num_free,
            kv_total=pool.num_blocks,
            preemptions=self.scheduler.num_preemptions,
            invalid_drafts=self.speculator.num_invalid,
            flags=SpeculationFlags(self.speculator.enabled, self._offered_method, self.validator.offered_depth),
            traffic=self._traffic,
            tiers=None if self.scheduler.tiers is None else self.scheduler.tiers.report(),
            advantage=self.speculator.depth.advantage if self.speculator.enabled else None,
            seconds=self.speculator.totals.seconds,
            executor_steps=dict(self.executor_counts),
            audit=self.audit.counts,
            generated=self.num_generated,
        )

    def _method_of(self, sequence: Sequence) -> str:
        """The method of a sequence under the present flags."""
        if self.assignment is not None:
            return self.assignment.method_of(sequence)
        return self.validator.method(sequence.speculation)

    @property
    def _offered_method(self) -> str:
        """The method of a request that names none."""
        if self.assignment is None or self.validator.flags.method is not None:
            return self.validator.offered_method
        return self.assignment.default.method

    def _report(self, now: float) -> None:
        if now - self._reported >= REPORT_SECONDS or not self.has_work:
            self._traffic, self._reported = self.speculator.traffic.report(), now

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        """End the request of `sequence` with an error for its owner. Its other choices end with it."""
        if not is_isolated(error):
            raise error
        request_id = sequence.request_id
        if not isinstance(error, PacelineError):
            logger.error("request %s failed; the others continue", request_id, exc_info=error)
        sequence.finish_reason = None
        self.cancel(request_id)
        self._failures.append(RequestFailure(request_id, owner_error(error)))

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.speculator.forget((sequence,))
        self._output.remove(sequence)
        for hook in self.hooks:
            with contained("a hook"):
                hook.sequence_finished(sequence)
        if all(sibling.is_finished for sibling in self._sequences.get(sequence.request_id, ())):
            self._sequences.pop(sequence.request_id, None)
