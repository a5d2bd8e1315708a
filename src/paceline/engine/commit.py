"""The requests of an engine, and the commit of a verified step to their sequences.

`Requests` keeps each request from its arrival to the end of its last sequence. `Committer` appends the tokens of a verified
step, frees the blocks of rejected drafts, and ends sequences.
"""

import logging
from collections.abc import Iterable

from paceline.core.clock import Clock
from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import ValidatedRequest
from paceline.core.sequence import FinishReason, Sequence
from paceline.engine.failures import RequestFailure, contained, is_isolated, owner_error
from paceline.engine.hook import StepHooks
from paceline.engine.observation import StepContents
from paceline.engine.output import OutputProcessor
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.engine.step.step import SequenceResult, StepResult
from paceline.policy.step import PromptPacer
from paceline.requests import Grammar, RequestValidator

logger = logging.getLogger(__name__)


class Requests:
    """Adds a request to every part of the engine, and removes it from all of them when it ends, is cancelled or fails."""

    def __init__(
        self,
        validator: RequestValidator,
        scheduler: Scheduler,
        speculator: Speculator,
        output: OutputProcessor,
        hooks: StepHooks,
        clock: Clock,
    ) -> None:
        self.output = output
        self.sequences: dict[str, list[Sequence]] = {}
        """Sequences of the unfinished requests, by request."""
        self._validator, self._scheduler, self._speculator = validator, scheduler, speculator
        self._hooks, self._clock = hooks, clock
        self._failures: list[RequestFailure] = []

    def add(self, request: ValidatedRequest, grammar: Grammar | None = None) -> None:
        """Queue a request. `grammar` is the grammar of its JSON schema, if it is compiled."""
        grammar = grammar or self._validator.grammar(request)
        if request.id in self.sequences:
            raise InvalidRequest(f"a request with id {request.id!r} is already running", field="id")
        sequences = self._validator.sequences(request, self._clock.now())
        self.output.add(sequences, grammar)
        self.sequences[request.id] = sequences
        try:
            for sequence in sequences:
                self._scheduler.add(sequence)
                for hook in self._hooks:
                    hook.sequence_added(sequence, grammar)
        except BaseException as error:
            waiting = [sequence for sequence in sequences if sequence in self._scheduler.waiting]
            for sequence in sequences:
                if sequence not in waiting:
                    self.output.remove(sequence)
            self.sequences[request.id] = waiting
            self.cancel(request.id)
            raise owner_error(error) from error

    def cancel(self, request_id: str) -> None:
        """Free everything the request holds, now. Cancelling a finished or unknown request is not an error."""
        for sequence in self.sequences.pop(request_id, []):
            if not sequence.is_finished:
                sequence.finish_reason = FinishReason.CANCELLED
                self.finish(sequence)
        for hook in self._hooks:
            with contained("a hook"):
                hook.request_cancelled(request_id)

    def finish(self, sequence: Sequence) -> None:
        """Free everything a sequence holds. Its request ends with its last sequence."""
        self._scheduler.remove(sequence)
        self._speculator.forget((sequence,))
        self.output.remove(sequence)
        for hook in self._hooks:
            with contained("a hook"):
                hook.sequence_finished(sequence)
        if all(sibling.is_finished for sibling in self.sequences.get(sequence.request_id, ())):
            self.sequences.pop(sequence.request_id, None)

    def fail(self, sequence: Sequence, error: BaseException) -> None:
        """End the request of `sequence` with an error for its owner. Its other choices end with it."""
        if not is_isolated(error):
            raise error
        request_id = sequence.request_id
        if not isinstance(error, PacelineError):
            logger.error("request %s failed; the others continue", request_id, exc_info=error)
        sequence.finish_reason = None
        self.cancel(request_id)
        self._failures.append(RequestFailure(request_id, owner_error(error)))

    def pop_failures(self) -> list[RequestFailure]:
        """The requests that failed since the last call. They have ended."""
        failures, self._failures = self._failures, []
        return failures

    def return_failures(self, failures: Iterable[RequestFailure]) -> None:
        """Give back failures that were taken, for the next call of `pop_failures`."""
        self._failures[:0] = failures


class Committer:
    """If a sequence fails here, it alone ends. The remaining sequences of the step are committed."""

    def __init__(
        self,
        requests: Requests,
        scheduler: Scheduler,
        speculator: Speculator,
        validator: RequestValidator,
        hooks: StepHooks,
        pacer: PromptPacer,
    ) -> None:
        """`pacer` limits the prompt tokens of a step."""
        self.num_generated = 0
        """Tokens committed."""
        self._requests, self._scheduler, self._speculator = requests, scheduler, speculator
        self._validator, self._hooks, self._pacer = validator, hooks, pacer
        self._last_verified: float | None = None
        """When the step before was verified. It is None if no sequence ran after it."""

    def commit(self, result: StepResult) -> list[StepOutput]:
        """Append the verified tokens, learn from the step, and return the new output."""
        for hook in self._hooks:
            hook.verified(result)
        outputs = []
        for sequence_result in result.sequences:
            if sequence_result.sequence.is_finished:  # another choice of its request failed in this step
                continue
            try:
                output = self._commit_one(sequence_result, result)
            except BaseException as error:
                self._requests.fail(sequence_result.sequence, error)
            else:
                outputs += [] if output is None else [output]
        self.num_generated += sum(len(output.tokens) for output in outputs)
        with contained("learning from a step"):
            self._learn(result)
        return outputs

    def _commit_one(self, sequence_result: SequenceResult, result: StepResult) -> StepOutput | None:
        sequence, verdict = sequence_result.sequence, sequence_result.verdict
        tables, output = self._scheduler.tables, None
        sequence.num_computed += sequence_result.num_tokens
        if verdict is not None:
            sequence.num_computed += len(verdict.path)
            if not result.is_graph:  # a step in flight still writes to the blocks reserved for it
                tables.shrink(sequence.id, sequence.num_computed)
            room = self._validator.remaining(sequence)
            output = self._requests.output.append(
                *(sequence, verdict, sequence_result.num_nodes, room),
                *(sequence_result.logits, result.times, sequence_result.scores),
            )
        # Full blocks are shared even if the sequence ended: the next turn of a conversation starts with them.
        tables.publish(sequence.id, sequence.ids, min(sequence.num_computed, len(sequence.ids)))
        if sequence.finish_reason is not None:
            self._requests.finish(sequence)
        return output

    def _learn(self, result: StepResult) -> None:
        self._speculator.learn(result)
        self._pace(result)
        for hook in self._hooks:
            hook.committed(result)

    def _pace(self, result: StepResult) -> None:
        """Decide how many prompt tokens the next step computes at most. The time of drafting does not count: a step that is
        full of prompts drafts nothing."""
        now, last = result.times.verified, self._last_verified
        running = self._scheduler.running
        self._last_verified = now if running else None
        if result.is_timed:
            contents = StepContents.of(result)
            drafted = sum([sequence_result.num_nodes for sequence_result in contents.rounds])
            times = result.times
            seconds = max(0.0, now - (times.began if last is None else last) - (times.drafted - times.began))
            self._pacer.observe(contents.batch, drafted, contents.prefill_rows, seconds, _mean_context(result))
        num_decoding = sum([sequence.num_uncomputed == 1 for sequence in running])
        self._scheduler.limit_prompts(self._pacer.room(num_decoding, self._scheduler.claims(now)))


def _mean_context(result: StepResult) -> float:
    """Mean number of tokens before a prompt row of a committed step."""
    rows = context = 0.0
    for sequence_result in result.sequences:
        count = sequence_result.num_tokens
        if count > 1:
            rows += count
            context += count * (sequence_result.sequence.num_computed - count / 2.0)
    return context / rows if rows else 0.0
