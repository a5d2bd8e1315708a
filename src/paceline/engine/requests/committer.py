"""Commits a verified step: appends its tokens, frees the blocks of rejected drafts, and ends sequences."""

from paceline.cluster.step import PromptPacer
from paceline.core.output import StepOutput
from paceline.engine.executors.executor import SequenceResult, StepResult
from paceline.engine.hooks.hook import StepHooks
from paceline.engine.isolation.failures import contained
from paceline.engine.requests.requests import Requests
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.engine.validator import RequestValidator


class Committer:
    """If a sequence fails here, it alone ends. The remaining sequences of the step are committed."""

    def __init__(
        self,
        requests: Requests,
        scheduler: Scheduler,
        speculator: Speculator,
        validator: RequestValidator,
        hooks: StepHooks,
        pacer: PromptPacer | None,
    ) -> None:
        """`pacer` limits the prompt tokens of a step. If None, the executor limits them."""
        self.num_generated = 0
        """Tokens committed."""
        self._requests, self._scheduler, self._speculator = requests, scheduler, speculator
        self._validator, self._hooks, self._pacer = validator, hooks, pacer

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
                sequence, verdict, sequence_result.num_nodes, room, sequence_result.logits, result.times
            )
        # Full blocks are shared even if the sequence ended: the next turn of a conversation starts with them.
        tables.publish(sequence.id, sequence.ids, min(sequence.num_computed, len(sequence.ids)))
        if sequence.finish_reason is not None:
            self._requests.finish(sequence)
        return output

    def _learn(self, result: StepResult) -> None:
        self._speculator.learn(result)
        if self._pacer is not None:
            self._pacer.observe(result.num_tokens, result.forward_seconds)
            self._scheduler.limit_prompts(self._pacer.max_tokens)
        for hook in self._hooks:
            hook.committed(result)
