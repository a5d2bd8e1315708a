from typing import Any

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.core.sequence import FinishReason
from paceline.speculation.distribution import distribution
from paceline.speculation.rows.rows import row_contexts
from paceline.tools.orchestrate.endpoint import EndpointRound, Outcome
from paceline.tools.orchestrate.servers import accept, pick, refuse_processed

GREEDY = SamplingParams(temperature=0.0, seed=0)


def test_a_greedy_pick_is_the_likeliest_token_and_the_lowest_at_a_tie() -> None:
    assert pick({7: -1.0, 3: -0.5, 9: -0.5}, GREEDY, 4) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "top_k": 8},
        {"temperature": 0.6, "top_k": 20},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 12, "min_p": 0.05},
    ],
)
def test_a_sampled_pick_is_that_of_the_engine(options: dict[str, Any]) -> None:
    from paceline.core.request import SpeculationParams
    from paceline.core.sequence import Sequence
    from paceline.speculation.drafts.drafts import Draft

    sampling = SamplingParams(seed=11, **options)
    generator = torch.Generator().manual_seed(5)
    for length in range(1, 30):
        logits = 3.0 * torch.randn(1, 100, generator=generator)
        sequence = Sequence(0, "r", [1] * length, length, sampling, SpeculationParams(), seed=11)
        expected = distribution.pick(logits, row_contexts(sequence, Draft(), None))[0].item()
        top = logits.log_softmax(1)[0].topk(20)
        row = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        assert pick(row, sampling, length) == expected


def round_of(draft: tuple[int, ...], output: tuple[int, ...] = (), **options: Any) -> EndpointRound:
    sampling = SamplingParams(temperature=0.0, seed=0, **{"max_tokens": 16, **options})
    return EndpointRound((1, 2, 3), output, draft, sampling, ends=frozenset({0}))


def test_the_draft_is_accepted_up_to_the_first_difference() -> None:
    assert accept(round_of((5, 6, 7)), [5, 6, 8, 9]) == Outcome((5, 6, 8), 2)
    assert accept(round_of((5, 6)), [5, 6, 7]) == Outcome((5, 6, 7), 2)
    assert accept(round_of((5, 6)), [4]) == Outcome((4,), 0)
    assert accept(round_of(()), [4]) == Outcome((4,), 0)


def test_a_text_ends_at_an_end_token_a_stop_token_or_its_last_token() -> None:
    assert accept(round_of((5, 0, 7)), [5, 0, 7, 1]) == Outcome((5, 0), 3, FinishReason.STOP)
    assert accept(round_of((5, 0), ignore_eos=True), [5, 0, 1]) == Outcome((5, 0, 1), 2)
    assert accept(round_of((5, 6), stop_token_ids=(5,)), [5, 6, 1]) == Outcome((5,), 2, FinishReason.STOP)
    assert accept(round_of((5, 6), output=(1,) * 14), [5, 6, 7]) == Outcome((5, 6), 2, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": 1.0}, "top_k"),
        ({"temperature": 1.0, "top_k": 21}, "top_k"),
        ({"temperature": 0.0, "presence_penalty": 0.5}, "penalties"),
        ({"temperature": 0.0, "logit_bias": {1: 2.0}}, "logit_bias"),
        ({"temperature": 0.0, "json_schema": {}}, "JSON schema"),
        ({"temperature": 0.0, "min_tokens": 2}, "min_tokens"),
    ],
)
def test_what_log_probabilities_do_not_determine_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    assert named in (refuse_processed(SamplingParams(**options), "vLLM") or "")


def test_greedy_and_top_k_are_not_refused() -> None:
    assert refuse_processed(GREEDY, "vLLM") is None
    assert refuse_processed(SamplingParams(temperature=0.7, top_k=20, top_p=0.9), "vLLM") is None
