"""Verified tokens become output: text, log-probabilities, and the end of a sequence."""

from collections.abc import Sequence as Seq

from torch import Tensor

from paceline.core.output import StepOutput, StepTimes
from paceline.core.sequence import FinishReason, Sequence
from paceline.engine.text import TextOutput
from paceline.models.tokenizer.text_stream import TextStream
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.speculation.drafts import Draft
from paceline.speculation.verification.distribution import logprobs
from paceline.speculation.verification.grammar import Grammar
from paceline.speculation.verification.verify import Verdict


class OutputProcessor:
    """The text and grammar state of every sequence."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer
        self._sequences: dict[int, SequenceOutput] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequences: Seq[Sequence], grammar: Grammar | None) -> None:
        """Add the sequences of one request; raises `InvalidRequest` and adds none if committed tokens break the grammar."""
        self._sequences.update({one.id: SequenceOutput(one, self._tokenizer, grammar) for one in sequences})

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]

    def masks(self, sequence: Sequence, draft: Draft) -> Seq[Tensor] | None:
        """What the grammar allows after the newest token and after each node; None: there is no grammar."""
        return self._sequences[sequence.id].masks(draft)

    def append(
        self,
        sequence: Sequence,
        verdict: Verdict,
        num_drafted: int,
        room: int,
        logits: Tensor | None = None,
        times: StepTimes | None = None,
    ) -> StepOutput:
        """Append the verdict's tokens to the sequence; see `SequenceOutput.append`."""
        return self._sequences[sequence.id].append(verdict, num_drafted, room, logits, times)


class SequenceOutput:
    """Text and grammar state of one sequence, always at its newest token. Tokens committed before it was made are not
    reported again."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None = None, grammar: Grammar | None = None) -> None:
        self._sequence = sequence
        stop_ids = sequence.sampling.stop_token_ids
        self._ends = sequence.eos_ids.union(stop_ids) if stop_ids else sequence.eos_ids
        self._text = TextOutput(TextStream(tokenizer), sequence.sampling.stop) if tokenizer else None
        self._grammar = grammar.start(sequence.output_ids) if grammar else None
        if self._text is not None:
            self._text.push(sequence.output_ids)

    def masks(self, draft: Draft) -> Seq[Tensor] | None:
        """What the grammar allows after the newest token and after each node; None: there is no grammar."""
        return None if self._grammar is None else self._grammar.masks(draft)

    def append(
        self, verdict: Verdict, num_drafted: int, room: int, rows: Tensor | None = None, times: StepTimes | None = None
    ) -> StepOutput:
        """Append the verdict's tokens up to the first that ends the sequence, at most `room`. `rows`: the logits
        [1 + num_drafted, V] of the step, for a sequence with log-probabilities."""
        sequence = self._sequence
        count, text = self._read(verdict.tokens, room)
        tokens = verdict.tokens[:count]
        sequence.ids.extend(tokens)
        if self._grammar is not None:
            self._grammar.advance(tokens)
        scores = None
        if sequence.sampling.logprobs is not None:
            assert rows is not None
            path_rows = [0, *(1 + node for node in verdict.path)][:count]
            scores = tuple(logprobs(rows[path_rows], tokens, sequence.sampling.logprobs))
        return StepOutput(
            request_id=sequence.request_id,
            sequence_id=sequence.id,
            choice=sequence.choice,
            tokens=tokens,
            origins=verdict.origins[:count],
            text=text,
            drafted=num_drafted,
            accepted=len(verdict.path),
            num_cached=min(sequence.num_cached, sequence.num_prompt),
            logprobs=scores,
            finish_reason=sequence.finish_reason,
            method=sequence.method,
            waited=0.0 if sequence.started is None else sequence.started - sequence.arrival,
            times=times,
        )

    def _read(self, tokens: Seq[int], room: int) -> tuple[int, str]:
        """Number of tokens that belong to the sequence, and their text. Sets `finish_reason` if the sequence ends."""
        sequence, stream, text, count = self._sequence, self._text, "", 0
        by_token = stream is not None and bool(
            sequence.sampling.stop
        )  # a stop string needs the token that completes it
        if not by_token and len(tokens) < room and self._ends.isdisjoint(tokens):  # the common case
            return len(tokens), "" if stream is None else stream.push(tokens)
        for token in tokens:
            count += 1
            if token in self._ends:
                sequence.finish_reason = FinishReason.STOP
                break
            if stream is not None and by_token:
                text += stream.push([token])
                if stream.stopped:
                    sequence.finish_reason = FinishReason.STOP
                    break
            if count == room:
                sequence.finish_reason = FinishReason.LENGTH
                break
        if stream is None:
            return count, ""
        if not by_token:  # the stop token is not part of the text
            text = stream.push(tokens[: count - (sequence.finish_reason is FinishReason.STOP)])
        if sequence.finish_reason is not None:
            text += stream.flush()
        return count, text
