"""Generates with and without speculation, and checks every token."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.audit.coupled_check import check_coupled
from paceline.audit.rejection_check import check_rejection
from paceline.audit.report import AuditedText
from paceline.audit.verify_log import VerifyLog
from paceline.core.errors import InvalidRequest
from paceline.core.output import CompletionOutput, Generation
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import Verification
from paceline.engine.llm import LLM, Prompt
from paceline.kernels.cpu import native
from paceline.kv.block_tables import blocks_for
from paceline.models.architectures.llama import DecoderModel
from paceline.models.runner import ModelRunner
from paceline.models.runners import make_second_runner
from paceline.speculation.verification.rescoring import FinishedText, Rescored, Rescoring

ROWS = 64
"""Tokens per rescoring pass."""
LOG_BYTES = 2**31
"""Memory for the verify log of one batch: longer texts are audited in smaller batches."""
OTHER_SEEDS = 2**40
"""Offset of the seeds of plain texts where the two samples must be independent."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of an audit and how they are sampled and verified."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    """Sampling parameters. The seed is that of the first prompt, and every next prompt has the next seed."""
    verification: Verification
    method: str | None = None
    """Drafting method. None leaves the choice to the engine."""
    concurrency: int = 8

    @property
    def is_coupled(self) -> bool:
        """Whether the text is a function of the seed. Greedy text is, under each rule."""
        return self.verification == "coupled" or self.sampling.is_greedy


class Auditor:
    """Audits an idle engine. Texts are rescored in a separate KV cache."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._runner = llm, llm.engine.runner
        self._runners: dict[int, ModelRunner] = {}  # by id of the model

    def run(self, workload: Workload, progress: Callable[[int], None] = lambda done: None) -> list[AuditedText]:
        """The audited texts in the order of the prompts. `progress` receives the number of prompts just done."""
        audited: list[AuditedText] = []
        # Up to three float32 rows of the vocabulary per token: logits, p and q.
        text_bytes = 12 * workload.sampling.max_tokens * self._runner.model.config.vocab_size
        batch_size = max(1, min(workload.concurrency, LOG_BYTES // text_bytes))
        try:
            for start in range(0, len(workload.prompts), batch_size):
                group = range(start, min(start + batch_size, len(workload.prompts)))
                audited.extend(self._audit(workload, group))
                progress(len(group))
        finally:
            for runner in self._runners.values():
                runner.close()
            self._runners.clear()
        return audited

    def _audit(self, workload: Workload, group: range) -> list[AuditedText]:
        log = VerifyLog()
        with self._llm.engine.hooks.listening(log):
            speculative = self._generate(workload, group, enabled=True)
        plain = self._generate(workload, group, enabled=False)
        with native.single_threaded_torch(), torch.inference_mode():
            return [
                self._check(workload, prompt, speculated, plain_run, log)
                for prompt, speculated, plain_run in zip(group, speculative, plain, strict=True)
            ]

    def _generate(self, workload: Workload, group: range, enabled: bool) -> list[Generation]:
        offset = 0 if enabled or workload.is_coupled else OTHER_SEEDS
        speculation: dict[str, Any] = {"enabled": enabled, "verification": workload.verification}
        if workload.method is not None:
            speculation["method"] = workload.method
        return self._llm.generate(
            [workload.prompts[i] for i in group],
            [replace(workload.sampling, seed=(workload.sampling.seed or 0) + i + offset) for i in group],
            speculation=speculation,
            # Different salts: the two runs must not share the prefix cache.
            cache_salt="audit/speculative" if enabled else "audit/plain",
        )

    def _check(
        self, workload: Workload, prompt: int, speculated: Generation, plain_run: Generation, log: VerifyLog
    ) -> AuditedText:
        completion, plain = speculated.completions[0], plain_run.completions[0]
        seed = (workload.sampling.seed or 0) + prompt
        text = _finished(workload.sampling, speculated, completion, seed)
        rescored = self._rescore(self._runner.model, text)
        origins = tuple(origin.value for origin in completion.origins)
        found = AuditedText(
            prompt,
            origins,
            completion.speculation.num_draft_tokens,
            completion.speculation.num_accepted_draft_tokens,
            findings=(),
        )
        entries = log.take(speculated.request_id, 0)
        if workload.is_coupled:
            return check_coupled(found, rescored, entries, completion, plain, self._runner)
        plain_rescored = self._rescore(
            self._runner.model, _finished(workload.sampling, plain_run, plain, seed + OTHER_SEEDS)
        )
        draft = self._draft(workload.method or self._llm.snapshot().flags.method or "")
        return check_rejection(
            found,
            rescored,
            entries,
            None if draft is None else _padded(self._rescore(draft, text), rescored.logits.shape[1]),
            plain_rescored,
            self._runner,
            random.Random(prompt),
        )

    def _rescore(self, model: DecoderModel, text: FinishedText) -> Rescored:
        """Logits of all output tokens of a text, from plain passes."""
        needed = blocks_for(len(text.ids))
        runner = self._runners.get(id(model))
        if runner is None or runner.num_blocks < needed:
            cache = self._runner.cache[0][0].dtype
            if runner is not None:
                runner.close()
            runner = make_second_runner(self._runner, model, needed, None if cache == model.dtype else cache)
            self._runners[id(model)] = runner
        rescoring, parts = Rescoring(text, runner, range(needed)), []
        while not rescoring.is_done:
            parts.append(rescoring.advance(ROWS))
        parts = [part for part in parts if part.tokens]
        return Rescored(
            0,
            tuple(token for part in parts for token in part.tokens),
            torch.cat([part.logits for part in parts]),
            tuple(row for part in parts for row in part.rows),
        )

    def _draft(self, method: str) -> DecoderModel | None:
        """The model whose q `method` samples from. None for methods without one, and for one-hot q."""
        proposer = self._llm.engine.speculator.proposers.get(method)
        return proposer.traits.q_model if proposer is not None else None


def _padded(rescored: Rescored, vocab_size: int) -> Rescored:
    """Fit a draft's logits to the target's vocabulary: missing tokens are impossible, extra ones are dropped."""
    logits = rescored.logits[:, :vocab_size]
    missing = vocab_size - logits.shape[1]
    padded = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
    return replace(rescored, logits=padded)


def _finished(
    sampling: SamplingParams, generation: Generation, completion: CompletionOutput, seed: int
) -> FinishedText:
    if sampling.json_schema is not None:
        raise InvalidRequest("an audit does not support JSON schemas", field="json_schema")
    return FinishedText(generation.prompt_token_ids, completion.token_ids, sampling, seed)
