"""Collects the outputs of a request until it is finished."""

from dataclasses import dataclass, field

from paceline.core.output import CompletionOutput, Generation, SpeculationMetrics, StepOutput, TokenLogprobs
from paceline.core.request import Request
from paceline.core.sequence import FinishReason, Origin, SpeculationCounts


@dataclass(slots=True)
class _Choice:
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    finish_reason: FinishReason | None = None


class Transcript:
    """Outputs of one request, by choice."""

    def __init__(self, request: Request, max_depth: int) -> None:
        self.request = request
        wanted = request.speculation.max_depth
        self._max_depth = max_depth if wanted is None else min(max_depth, wanted)
        self._choices = [_Choice() for _ in range(request.sampling.n)]
        self._num_cached = 0
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    def add(self, output: StepOutput) -> None:
        choice = self._choices[output.choice]
        choice.tokens.extend(output.tokens)
        choice.origins.extend(output.origins)
        choice.texts.append(output.text)
        choice.logprobs.extend(output.logprobs or ())
        choice.finish_reason = output.finish_reason
        if output.drafted:
            choice.counts.add(output.drafted, output.accepted)
        if output.choice == 0:  # the other choices hit the prompt that the first computed
            self._num_cached = output.num_cached
            self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs

    def generation(self) -> Generation:
        """The finished request."""
        completions = tuple(self._completion(i, choice) for i, choice in enumerate(self._choices))
        return Generation(
            self.request.id, self.request.prompt_ids, completions, self._num_cached, self._prompt_logprobs
        )

    def _completion(self, index: int, choice: _Choice) -> CompletionOutput:
        assert choice.finish_reason is not None
        return CompletionOutput(
            index=index,
            text="".join(choice.texts),
            token_ids=tuple(choice.tokens),
            finish_reason=choice.finish_reason,
            origins=tuple(choice.origins),
            logprobs=tuple(choice.logprobs) if self.request.sampling.logprobs is not None else None,
            speculation=speculation_metrics(choice.counts, self._max_depth),
        )


def speculation_metrics(counts: SpeculationCounts, max_depth: int) -> SpeculationMetrics:
    return SpeculationMetrics(
        mean_acceptance_length=1.0 + counts.accepted / counts.rounds if counts.rounds else 1.0,
        draft_acceptance_rate=counts.accepted / counts.drafted if counts.drafted else 0.0,
        # As in vLLM: one entry for every number of accepted tokens that is possible
        acceptance_histogram=(*counts.histogram, *(0,) * (max_depth + 1 - len(counts.histogram))),
        num_spec_steps=counts.rounds,
        num_accepted_draft_tokens=counts.accepted,
        num_draft_tokens=counts.drafted,
        num_spec_tokens=max(max_depth, len(counts.histogram) - 1),
    )
