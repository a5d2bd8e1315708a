"""Text of committed tokens, up to a stop string.

The engine returns tokens. Their receiver (a gateway, or `LLM`) makes the text, with the class that the engine uses to find
stop strings. Engine and receiver see the same tokens in the same order, so that they end a sequence at the same token.

A `Transcript` collects the outputs of a request until it is finished.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.output import CompletionOutput, Generation, SpeculationMetrics, StepOutput, TokenLogprobs
from paceline.core.request import Request, SamplingParams
from paceline.core.sequence import FinishReason, Origin, SpeculationCounts
from paceline.model_files.tokenizer import TextStream, Tokenizer


def end_tokens(sampling: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end a sequence. They are not part of its text."""
    ends = frozenset() if sampling.ignore_eos else eos_ids
    return ends.union(sampling.stop_token_ids) if sampling.stop_token_ids else ends


class TextOutput:
    """The text of one sequence. Text that may still become part of a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, before: int | None = None) -> None:
        """`before` is the last token of the prompt."""
        self._stream = TextStream(tokenizer, sampling.skip_special_tokens, before)
        self._ends = end_tokens(sampling, tokenizer.eos_ids)
        self._stops = sampling.stop
        self._num_unchecked = sampling.min_tokens - 1
        """Next tokens whose text cannot end the sequence."""
        self._longest = max(map(len, self._stops), default=1) - 1
        self._held = ""
        self.stopped = False
        """Whether a stop string is complete."""

    def add(self, tokens: Sequence[int], is_last: bool) -> str:
        """Text that a step makes certain. `is_last` is true if no further tokens follow."""
        if self._stops:
            text = "".join([self.push(token) for token in tokens])
        elif is_last and tokens and tokens[-1] in self._ends:
            text = self._stream.push(tokens[:-1])
        else:
            text = self._stream.push(tokens)
        return text + self._flush() if is_last else text

    def push(self, token: int) -> str:
        """Add one token of a sequence with stop strings. Sets `stopped` when one is complete; the text ends before it."""
        if self.stopped or token in self._ends:
            return ""
        self._num_unchecked -= 1
        text = self._stream.push(token)
        return text if self._num_unchecked >= 0 else self._take(text)

    def _flush(self) -> str:
        """The text held back, at the end of a sequence without a stop string."""
        if self.stopped:
            return ""
        text = self._take(self._stream.flush()) if self._stops else self._stream.flush()
        text, self._held = text + self._held, ""
        return text

    def _take(self, new: str) -> str:
        self._held += new
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = self._possible_stop()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        for size in range(min(self._longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0


class RequestText:
    """The texts of all choices of one request."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        last = request.prompt_ids[-1]
        self._choices = [TextOutput(tokenizer, request.sampling, last) for _ in range(request.sampling.n)]

    def add(self, output: StepOutput) -> StepOutput:
        """The output, with its text set."""
        output.text = self._choices[output.choice].add(output.tokens, output.finish_reason is not None)
        return output


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
