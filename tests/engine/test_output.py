"""What is written down of a verdict, and where it stops."""

from typing import Any

import pytest
import torch

from paceline.core.output import StepOutput, StepTimes
from paceline.core.request import SamplingParams, SpeculationParams
from paceline.core.sequence import FinishReason, Origin, Sequence
from paceline.engine.output import SequenceOutput
from paceline.requests.grammar import Grammar
from paceline.requests.text import TextOutput
from paceline.speculation.drafts.drafts import Draft
from paceline.speculation.verification.verification import Verdict
from tests.engine.harness import CHARACTERS, EOS, letters

NUMBER = {"type": "integer", "minimum": 10, "maximum": 55}


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def sequence_of(output: str = "", eos: bool = True, **sampling: Any) -> Sequence:
    return Sequence(
        id=4,
        request_id="r",
        ids=[1, 2, *ids(output)],
        num_prompt=2,
        sampling=SamplingParams(**sampling),
        speculation=SpeculationParams(),
        seed=0,
        eos_ids=frozenset({EOS}) if eos else frozenset(),
    )


def accepted(tokens: list[int], path: tuple[int, ...] | None = None) -> Verdict:
    path = tuple(range(len(tokens) - 1)) if path is None else path
    return Verdict(path, tuple(tokens), (*(Origin.ACCEPTED,) * (len(tokens) - 1), Origin.BONUS))


def written(sequence: Sequence, *texts: str, room: int = 99) -> list[StepOutput]:
    """The outputs of these steps, with the text that their receiver makes."""
    output, outputs = SequenceOutput(sequence, letters()), []
    received = TextOutput(letters(), sequence.sampling)
    for token in sequence.output_ids:
        received.add([token], False)
    for text in texts:
        one = output.append(accepted(ids(text)), len(text) - 1, room)
        one.text = received.add(one.tokens, one.finish_reason is not None)
        outputs.append(one)
        room -= len(text)
    return outputs


def test_all_of_a_verdict_that_ends_nothing() -> None:
    sequence = sequence_of()
    (output,) = written(sequence, "abc")
    assert (output.text, output.tokens, output.finish_reason) == ("abc", tuple(ids("abc")), None)
    assert output.origins == (Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS)
    assert (output.drafted, output.accepted) == (2, 2)
    assert sequence.ids == [1, 2, *ids("abc")]


def test_a_stop_token_belongs_to_the_sequence_and_not_to_its_text() -> None:
    sequence = sequence_of()
    output = SequenceOutput(sequence, letters()).append(accepted([*ids("ab"), EOS, *ids("cd")]), 4, 99)
    assert output.finish_reason is FinishReason.STOP
    assert TextOutput(letters(), sequence.sampling).add(output.tokens, True) == "ab"
    assert sequence.output_ids == [*ids("ab"), EOS]
    assert output.origins == (Origin.ACCEPTED,) * 3
    assert output.accepted == 4  # verified, if not used


def test_a_stop_string_ends_it_with_the_token_that_completes_it() -> None:
    sequence = sequence_of(stop=("cd",))
    first, second = written(sequence, "abc", "def")
    assert (first.text, first.finish_reason) == ("ab", None)  # c may be the beginning of it
    assert (second.text, second.finish_reason) == ("", FinishReason.STOP)
    assert sequence.output_ids == ids("abcd")


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_room_is_the_limit_and_its_last_token_is_text(stop: tuple[str, ...]) -> None:
    sequence = sequence_of(stop=stop)
    (output,) = written(sequence, "abcz", room=3)
    assert (output.text, output.finish_reason) == ("abc", FinishReason.LENGTH)


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    (output,) = written(sequence_of(stop=("cd",)), "abc", room=3)
    assert (output.text, output.finish_reason) == ("abc", FinishReason.LENGTH)


def test_what_was_committed_before_is_not_said_again_but_counts_for_stop_strings() -> None:
    (output,) = written(sequence_of("ab", stop=("bc",)), "cd")
    assert (output.text, output.tokens, output.finish_reason) == ("", tuple(ids("c")), FinishReason.STOP)


def test_without_a_tokenizer_there_are_tokens_alone() -> None:
    output = SequenceOutput(sequence_of(stop=("a",))).append(accepted(ids("abc")), 2, 99)
    assert (output.text, len(output.tokens), output.finish_reason) == ("", 3, None)


def test_log_probabilities_are_those_of_the_rows_on_the_path() -> None:
    rows = torch.randn(4, len(CHARACTERS), generator=torch.Generator().manual_seed(0))  # [1 + 3 nodes, V]
    output = SequenceOutput(sequence_of(logprobs=0)).append(accepted(ids("ab"), path=(2,)), 3, 99, rows)
    assert output.logprobs is not None
    expected = [float(rows[row].log_softmax(0)[token]) for row, token in zip((0, 3), ids("ab"), strict=True)]
    assert [one.logprob for one in output.logprobs] == pytest.approx(expected, abs=1e-6)


def test_a_grammar_follows_the_tokens() -> None:
    tokenizer = letters()
    grammar = Grammar.compile(NUMBER, tokenizer.to_json(), tokenizer.eos_ids, EOS + 1)
    output = SequenceOutput(sequence_of(), tokenizer, grammar)

    def allowed() -> str:
        masks = output.masks(Draft())
        assert masks is not None
        return "".join(CHARACTERS[i] for i in range(EOS) if masks[0][i // 32] >> i % 32 & 1)

    assert allowed() == "12345"
    output.append(accepted(ids("5")), 0, 99)
    assert allowed() == "012345"
    output.append(accepted(ids("0")), 0, 99)
    assert allowed() == ""
    assert SequenceOutput(sequence_of(), tokenizer).masks(Draft()) is None


def test_waiting_and_times_are_told() -> None:
    sequence, times = sequence_of(), StepTimes(1.0, 2.0, 3.0)
    sequence.arrival, sequence.started = 5.0, 7.5
    output = SequenceOutput(sequence).append(accepted([3]), 0, 9, times=times)
    assert (output.waited, output.times) == (2.5, times)
