from typing import Any

import pytest

from paceline.core.output import StepOutput, TokenLogprobs
from paceline.core.request import Request, SamplingParams, SpeculationParams
from paceline.core.sequence import FinishReason, Origin
from paceline.requests.text import Transcript

ACCEPTED, RECOVERED, BONUS, PLAIN = Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS, Origin.PLAIN


def transcript(speculation: dict[str, Any] | None = None, **sampling: Any) -> Transcript:
    asked = Request("r", (1, 2), SamplingParams(**sampling), SpeculationParams(**(speculation or {})))
    return Transcript(asked, max_depth=8)


def output(tokens: tuple[int, ...], origins: tuple[Origin, ...] = (), choice: int = 0, **more: Any) -> StepOutput:
    text = more.pop("text", "".join(chr(97 + token) for token in tokens))
    return StepOutput("r", choice, choice, tokens, origins or (PLAIN,) * len(tokens), text, **more)


def test_steps_add_up_to_a_generation() -> None:
    part = transcript(logprobs=0)
    logprobs = tuple(TokenLogprobs(token, -0.5, ()) for token in range(4))
    part.add(output((0,), logprobs=logprobs[:1], num_cached=16))
    part.add(output((1, 2), (ACCEPTED, RECOVERED), drafted=4, accepted=1, logprobs=logprobs[1:3], num_cached=16))
    assert not part.is_finished
    part.add(output((3,), logprobs=logprobs[3:], num_cached=16, finish_reason=FinishReason.STOP))
    assert part.is_finished
    generation = part.generation()
    (completion,) = generation.completions
    assert (generation.request_id, generation.prompt_token_ids, generation.num_cached_tokens) == ("r", (1, 2), 16)
    assert generation.text == completion.text == "abcd"
    assert completion.token_ids == (0, 1, 2, 3)
    assert completion.origins == (PLAIN, ACCEPTED, RECOVERED, PLAIN)
    assert completion.logprobs == logprobs
    assert completion.finish_reason is FinishReason.STOP


def test_choices_are_kept_apart_and_all_must_end() -> None:
    part = transcript(n=2)
    part.add(output((1,), choice=1, finish_reason=FinishReason.LENGTH))
    part.add(output((5,)))
    assert not part.is_finished
    part.add(output((6,), finish_reason=FinishReason.STOP))
    assert [(c.index, c.text, c.finish_reason) for c in part.generation().completions] == [
        (0, "fg", FinishReason.STOP),
        (1, "b", FinishReason.LENGTH),
    ]


def test_logprobs_are_there_only_if_asked_for() -> None:
    part = transcript()
    part.add(output((1,), finish_reason=FinishReason.STOP))
    assert part.generation().completions[0].logprobs is None


def test_speculation_is_counted_by_round() -> None:
    part = transcript()
    part.add(output((1,)))  # a plain step is no round
    part.add(output((1, 2, 3), (ACCEPTED, ACCEPTED, BONUS), drafted=2, accepted=2))
    part.add(output((4,), (RECOVERED,), drafted=4, accepted=0))
    part.add(output((5, 6, 7), (ACCEPTED, ACCEPTED, RECOVERED), drafted=4, accepted=2))
    part.add(output((8,), (ACCEPTED,), drafted=4, accepted=4, finish_reason=FinishReason.STOP))  # cut by a stop
    metrics = part.generation().completions[0].speculation
    assert metrics.acceptance_histogram == (1, 0, 2, 0, 1, 0, 0, 0, 0)  # as long as the largest depth allows
    assert metrics.num_spec_steps == 4
    assert (metrics.num_accepted_draft_tokens, metrics.num_draft_tokens) == (8, 14)
    assert metrics.draft_acceptance_rate == pytest.approx(8 / 14)
    assert metrics.mean_acceptance_length == pytest.approx(1 + 8 / 4)


def test_without_a_round_the_figures_are_those_of_plain_decoding() -> None:
    part = transcript()
    part.add(output((1,), finish_reason=FinishReason.STOP))
    metrics = part.generation().completions[0].speculation
    assert (metrics.mean_acceptance_length, metrics.draft_acceptance_rate) == (1.0, 0.0)
    assert metrics.acceptance_histogram == (0,) * 9


@pytest.mark.parametrize(("wanted", "told"), [(None, 8), (3, 3), (20, 8), (0, 0)])
def test_the_deepest_round_is_what_the_request_may_have(wanted: int | None, told: int) -> None:
    part = transcript({"max_depth": wanted})
    part.add(output((1,), finish_reason=FinishReason.STOP))
    assert part.generation().completions[0].speculation.num_spec_tokens == told
