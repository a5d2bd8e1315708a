"""Verified tokens become output: tokens, log-probabilities, and the end of a sequence."""

from collections.abc import Sequence as Seq

from torch import Tensor

from paceline.core.output import StepOutput, StepTimes, TokenLogprobs
from paceline.core.sequence import FinishReason, Sequence
from paceline.model_files.tokenizer import Tokenizer
from paceline.requests import Grammar, TextOutput
from paceline.speculation.distribution import logprobs
from paceline.speculation.drafts import Draft
from paceline.speculation.verification import Verdict


class OutputProcessor:
    """The grammar and stop-string state of every sequence."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer` makes text of sequences with stop strings; without one they have none."""
        self._tokenizer = tokenizer
        self._sequences: dict[int, SequenceOutput] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequences: Seq[Sequence], grammar: Grammar | None) -> None:
        """Add the sequences of one request; raises `InvalidRequest` and adds none if committed tokens break the grammar."""
        self._sequences.update(
            {sequence.id: SequenceOutput(sequence, self._tokenizer, grammar) for sequence in sequences}
        )

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]

    def has_grammar(self, sequence: Sequence) -> bool:
        return self._sequences[sequence.id].has_grammar

    def masks(self, sequence: Sequence, draft: Draft) -> Seq[Tensor] | None:
        """What the grammar allows after the newest token and after each node. None if there is no grammar."""
        return self._sequences[sequence.id].masks(draft)

    def add_prompt_logits(self, sequence: Sequence, start: int, logits: Tensor) -> None:
        """Logits [R, V] of consecutive prompt tokens, the first at position `start`, for a request with `prompt_logprobs`."""
        self._sequences[sequence.id].add_prompt_logits(start, logits)

    def append(
        self,
        sequence: Sequence,
        verdict: Verdict,
        num_drafted: int,
        room: int,
        logits: Tensor | None = None,
        times: StepTimes | None = None,
        scores: Seq[TokenLogprobs] | None = None,
    ) -> StepOutput:
        """Append the verdict's tokens to the sequence; see `SequenceOutput.append`."""
        return self._sequences[sequence.id].append(verdict, num_drafted, room, logits, times, scores)


class SequenceOutput:
    """Grammar and stop-string state of one sequence, always at its newest token. Tokens committed before it was made are
    not reported again."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None = None, grammar: Grammar | None = None) -> None:
        self._sequence = sequence
        stop_ids = sequence.sampling.stop_token_ids
        self._ends = sequence.eos_ids.union(stop_ids) if stop_ids else sequence.eos_ids
        last = sequence.ids[sequence.num_prompt - 1]
        self._text = TextOutput(tokenizer, sequence.sampling, last) if tokenizer and sequence.sampling.stop else None
        self._grammar = grammar.start(sequence.output_ids) if grammar else None
        self._error: BaseException | None = None
        has_scores = sequence.choice == 0 and sequence.sampling.prompt_logprobs is not None
        self._prompt_scores: list[TokenLogprobs] | None = [] if has_scores else None
        """Log-probabilities of the prompt tokens after the first, as far as they are computed. None if the request does not
        want them, or if they are returned."""
        if self._text is not None:
            for token in sequence.output_ids:
                self._text.push(token)

    @property
    def has_grammar(self) -> bool:
        return self._grammar is not None

    def masks(self, draft: Draft) -> Seq[Tensor] | None:
        """What the grammar allows after the newest token and after each node. None if there is no grammar.

        It raises nothing, because the step belongs to other sequences too: `append` raises the error of the grammar.
        """
        if self._grammar is None:
            return None
        try:
            return self._grammar.masks(draft.tokens, draft.parents)
        except BaseException as error:
            self._error = error
            return None

    def add_prompt_logits(self, start: int, logits: Tensor) -> None:
        sequence, scores = self._sequence, self._prompt_scores
        if scores is None:  # returned before a preemption
            return
        known = len(scores) - start  # rows computed before a preemption
        tokens = sequence.ids[start + 1 : sequence.num_prompt][: len(logits)]
        if known < len(tokens):
            assert sequence.sampling.prompt_logprobs is not None
            scores += logprobs(logits[known : len(tokens)], tokens[known:], sequence.sampling.prompt_logprobs)

    def append(
        self,
        verdict: Verdict,
        num_drafted: int,
        room: int,
        rows: Tensor | None = None,
        times: StepTimes | None = None,
        scores: Seq[TokenLogprobs] | None = None,
    ) -> StepOutput:
        """Append the verdict's tokens up to the first that ends the sequence, at most `room`. A sequence with log-probabilities
        has `scores`, those of the verdict's tokens, or `rows`, the logits [1 + num_drafted, V] of the step."""
        if self._error is not None:
            raise self._error
        sequence = self._sequence
        count = self._count(verdict.tokens, room)
        tokens = verdict.tokens[:count]
        if sequence.draft is not None and sequence.finish_reason is None:  # one round only
            sequence.finish_reason = FinishReason.LENGTH
        sequence.ids.extend(tokens)
        if self._grammar is not None:
            self._grammar.advance(tokens)
        if sequence.sampling.logprobs is not None and scores is None:
            assert rows is not None
            path_rows = [0, *(1 + node for node in verdict.path)][:count]
            scores = logprobs(rows[path_rows], tokens, sequence.sampling.logprobs)
        prompt_scores = None if self._prompt_scores is None else tuple(self._prompt_scores)
        self._prompt_scores = None
        return StepOutput(
            request_id=sequence.request_id,
            sequence_id=sequence.id,
            choice=sequence.choice,
            tokens=tokens,
            origins=verdict.origins[:count],
            drafted=num_drafted,
            accepted=len(verdict.path),
            num_cached=min(sequence.num_cached, sequence.num_prompt),
            logprobs=None if scores is None else tuple(scores[:count]),
            prompt_logprobs=prompt_scores,
            finish_reason=sequence.finish_reason,
            method=sequence.method,
            waited=0.0 if sequence.started is None else sequence.started - sequence.arrival,
            times=times,
        )

    def _count(self, tokens: Seq[int], room: int) -> int:
        """Number of tokens that belong to the sequence. Sets `finish_reason` if the sequence ends."""
        sequence, text = self._sequence, self._text
        if text is None and len(tokens) < room and self._ends.isdisjoint(tokens):  # the common case
            return len(tokens)
        for count, token in enumerate(tokens, 1):
            if token in self._ends:
                sequence.finish_reason = FinishReason.STOP
                return count
            if text is not None:
                text.push(token)
                if text.stopped:
                    sequence.finish_reason = FinishReason.STOP
                    return count
            if count == room:
                sequence.finish_reason = FinishReason.LENGTH
                return count
        return len(tokens)
