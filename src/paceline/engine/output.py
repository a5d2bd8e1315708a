"""Writes down what verification decided for one sequence: its tokens, their text, and where it ends."""

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


class Scribe:
    """One sequence's text and grammar, always at its newest token. Tokens that are committed already were said by whoever
    committed them."""

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
        """Take the verdict's tokens up to the first that ends the sequence, `room` of them at the most. `rows`: the logits
        [1 + num_drafted, V] that it was judged by, for a sequence that wants log-probabilities."""
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
        """How many of the tokens belong to the sequence, and their text. Sets `finish_reason` if it ends there."""
        sequence, said, text, count = self._sequence, self._text, "", 0
        by_token = said is not None and bool(sequence.sampling.stop)  # only a stop string cares which token brought it
        if not by_token and len(tokens) < room and self._ends.isdisjoint(tokens):  # nearly always
            return len(tokens), "" if said is None else said.push(tokens)
        for token in tokens:
            count += 1
            if token in self._ends:
                sequence.finish_reason = FinishReason.STOP
                break
            if said is not None and by_token:
                text += said.push([token])
                if said.stopped:
                    sequence.finish_reason = FinishReason.STOP
                    break
            if count == room:
                sequence.finish_reason = FinishReason.LENGTH
                break
        if said is None:
            return count, ""
        if not by_token:  # the token that stops it is no text
            text = said.push(tokens[: count - (sequence.finish_reason is FinishReason.STOP)])
        if sequence.finish_reason is not None:
            text += said.flush()
        return count, text
