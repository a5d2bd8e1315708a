"""The loop: schedule -> propose -> verify -> commit."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from time import monotonic

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.core.kv_events import CacheEvent
from paceline.core.output import StepOutput
from paceline.core.request import Request, ValidatedRequest
from paceline.engine.commit import Committer, Requests
from paceline.engine.failures import RequestFailure, StepTimePrediction, contained
from paceline.engine.hook import RunnerAndSpeculator, StepHook, StepHooks
from paceline.engine.host import HostExecutor
from paceline.engine.output import OutputProcessor
from paceline.engine.recovery import EngineRecovery
from paceline.engine.scheduler import Scheduler
from paceline.engine.selector import ExecutorSelector
from paceline.engine.speculator import Speculator
from paceline.engine.status import AssignedMethods, AuditReport, RunTimeFlags, StatusReporter
from paceline.engine.step.step import GraphStepExecutor, StepExecutor, StepResult
from paceline.model_files import SystemFingerprint
from paceline.model_files.tokenizer import Tokenizer
from paceline.models.decoder import DecoderModel
from paceline.models.manifest.manifest import check_replaceable, replace_weights
from paceline.models.runner import ModelRunner
from paceline.policy.step import CHEAP_ROWS, DEFAULT_OBJECTIVES, LEAST_MEASURED, Objectives, PromptPacer
from paceline.requests import Grammar, RequestValidator

logger = logging.getLogger(__name__)


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
        graph: GraphStepExecutor | None = None,
        hooks: Seq[StepHook] = (),
        assignment: AssignedMethods | None = None,
        audit: AuditReport | None = None,
        counted_bytes: int = 0,
        fingerprint: SystemFingerprint | None = None,
        objectives: Objectives = DEFAULT_OBJECTIVES,
    ) -> None:
        """`graph` runs steps as CUDA graphs; None on a CPU. `hooks` are all hooks of the engine: see `engine_of_parts` for
        those that every engine has, of which `assignment` and `audit` are two. `counted_bytes` is the memory that the builder
        computed before it loaded anything. `fingerprint` is what its texts depend on. None if the model has no files. The size
        of prompt pieces follows the `objectives`."""
        self.runner = runner
        self.scheduler = scheduler
        self.speculator = speculator
        self.validator = validator
        self.tokenizer = tokenizer
        self.clock = clock or WallClock()
        self.graph = graph
        self.counted_bytes = counted_bytes
        self.fingerprint = fingerprint
        self.num_steps = 0
        """Steps begun; a busy engine whose count stands still is stuck."""
        self.watch = StepTimePrediction()
        self.assignment = assignment
        """Chooses the method of requests that name none. None if they get the validator's default."""
        self.hooks = StepHooks(hooks, RunnerAndSpeculator(runner, speculator))
        output = OutputProcessor(tokenizer)
        self.requests = Requests(validator, scheduler, speculator, output, self.hooks, self.clock)
        host = HostExecutor(runner, scheduler, speculator, output, self.clock, self.hooks)
        self.executors = ExecutorSelector(host, graph, scheduler, speculator, self.hooks, self.clock)
        pacer = PromptPacer(objectives, LEAST_MEASURED if graph is None else CHEAP_ROWS)
        self._committer = Committer(self.requests, scheduler, speculator, validator, self.hooks, pacer)
        self._recovery = EngineRecovery(self.requests, scheduler, self.executors, self._step)
        self._committed: tuple[StepExecutor, StepResult | None] | None = None
        """The last step, until `prepare_next`."""
        self.flags = RunTimeFlags(validator, scheduler, speculator, self.assignment)
        self.status = StatusReporter(scheduler, speculator, self.flags, self.executors, self._committer, audit)

    def step(self) -> list[StepOutput]:
        """Run one step and return what it added to each sequence.

        A request that fails ends alone; `pop_failures` returns it. The step raises only if the engine itself has failed.
        """
        outputs = self.advance()
        self.prepare_next()
        return outputs

    def advance(self) -> list[StepOutput]:
        """The part of a step that ends with the commit. A caller that passes on its outputs before it calls `prepare_next` lets
        no token wait for the decisions about the next step."""
        try:
            return self._step()
        except BaseException as error:
            return self._recovery.recover(error)

    def _step(self) -> list[StepOutput]:
        """schedule -> propose -> verify -> commit. The graph executor runs one step ahead: its `collect` returns the step that
        was submitted before this one, or None if there was none."""
        self.prepare_next()  # after a failure, the recovery runs several steps in one call of `advance`
        self.num_steps += 1
        for hook in self.hooks:
            hook.before_step()
        executor, schedule = self.executors.schedule()
        if schedule is not None:
            # A graph step decodes the sequences in the slots in addition to the prompts that it schedules
            num_slots = len(self.scheduler.running) if executor is self.graph else 0
            self.watch.begin(schedule.num_tokens + num_slots, monotonic())
            drafts = executor.propose(schedule)
            executor.submit(schedule, drafts)  # verify: may stay in flight
        result = executor.collect()
        outputs = []
        if result is not None:
            outputs = self._committer.commit(result)
            # The tokens are committed: what fails from here on must not lose them
            with contained("the report of a step"):
                self.status.observe(result.times.drafted)
        self._committed = executor, result
        return outputs

    def prepare_next(self) -> None:
        """Decide what the next step drafts, once after every commit."""
        if self._committed is None:
            return
        (executor, result), self._committed = self._committed, None
        with contained("the end of a step"):
            if result is not None:
                executor.prepare_next(result)
            for hook in self.hooks:
                hook.after_step()
        self.watch.end(monotonic())

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def seconds_to_spare(self) -> float:
        """How long the next step can wait for requests without letting the device run dry."""
        return self.graph.seconds_to_spare if self.graph is not None else 0.0

    def validate(self, request: Request) -> ValidatedRequest:
        """The request with its seed, or `InvalidRequest`. It is safe to call from any thread."""
        return self.validator.validate(request)

    def add(self, request: ValidatedRequest, grammar: Grammar | None = None) -> None:
        """Queue a request; its tokens come out of `step`.

        `grammar` is the grammar of its JSON schema, if the caller has compiled it on another thread.
        """
        self.requests.add(request, grammar)

    def cancel(self, request_id: str) -> None:
        """Free everything the request holds, now. Cancelling a finished or unknown request is not an error."""
        self.requests.cancel(request_id)

    def pop_failures(self) -> list[RequestFailure]:
        """The requests that failed since the last call. They have ended."""
        return self.requests.pop_failures()

    def use_weights(self, other: DecoderModel, checksum: str) -> None:
        """Use the weights of a model of the same architecture from the next step on; the prefix cache is cleared. `checksum` is
        that of their files. The engine has no work. Raises `PacelineError` before anything is changed."""
        if self.has_work:
            raise PacelineError("weights are replaced while no request runs")
        if self.scheduler.tiers is not None:
            raise InvalidConfig(
                "kv_host_bytes and kv_disk keep blocks of the weights in use: remove them to replace weights, or restart the "
                "server with the new model"
            )
        if self.runner.model.layers[0].reduce is not None:
            raise InvalidConfig(
                "weights of a tensor-parallel target are not replaced while it runs: restart the server with the new model"
            )
        check_replaceable(self.runner.model, other)
        if self.graph is not None:
            self.graph.release()
        for hook in self.hooks:
            hook.weights_changed()
        replace_weights(self.runner.model, other)
        if self.fingerprint is not None:
            self.fingerprint = self.fingerprint.with_weights(checksum)
            self.runner.identify(self.fingerprint.weights_id)
        self.scheduler.tables.pool.clear()
        for proposer in self.speculator.proposers.values():
            if proposer.traits.weights is not None:
                proposer.traits.weights.forget_states()

    def warm_up(self) -> None:
        """Compile kernels and capture the graphs that any traffic needs, before the first request."""
        if self.graph is None or self.has_work:
            return
        began = self.clock.now()
        self.graph.warm_up()
        logger.info("warm-up took %.1f s", self.clock.now() - began)

    def listen(self, listener: Callable[[CacheEvent], None]) -> None:
        """Report every change of the cache, in all tiers, to `listener` from now on. It must not block."""
        if self.scheduler.tiers is None:
            self.scheduler.tables.pool.listen(listener)
        else:
            self.scheduler.tiers.listen(listener)

    def close(self) -> None:
        """Save the cache tiers that survive a restart and end the processes of other ranks. Safe to call twice."""
        try:
            for hook in self.hooks:
                hook.close()
        finally:
            self.runner.close()
