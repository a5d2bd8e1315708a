"""Log-probabilities of prompt tokens: computed in chunks, with and without drafts, once per request."""

import math

import pytest
import torch

from paceline.core.errors import InvalidRequest
from paceline.core.output import TokenLogprobs
from paceline.engine import host
from paceline.kernels.cpu import native
from paceline.models.runner.runner import ModelRunner, Span
from paceline.speculation.distribution.distribution import logprobs
from tests.engine.harness import LONG, MODEL, SAMPLED, engine_of, outputs_of, request, tokens_of
from tests.fakes import TINY, random_chain


def expected(prompt: tuple[int, ...], top: int) -> list[TokenLogprobs]:
    """From one pass over the whole prompt."""
    output = ModelRunner(MODEL, 8).forward([Span([0, 1, 2, 3], 0, prompt, num_logits=len(prompt))])
    assert output.logits is not None
    return logprobs(output.logits[:-1], prompt[1:], top)


def assert_equal(scores: tuple[TokenLogprobs, ...] | None, wanted: list[TokenLogprobs]) -> None:
    """Bit for bit where the kernels are native."""
    assert scores is not None
    if native.available():
        assert list(scores) == wanted
        return
    assert [(one.token, one.rank) for one in scores] == [(one.token, one.rank) for one in wanted]
    assert [token for one in scores for token, _ in one.top] == [token for one in wanted for token, _ in one.top]
    assert [one.logprob for one in scores] == pytest.approx([one.logprob for one in wanted], abs=1e-4)


@pytest.mark.parametrize("chunk", [512, 16, 7])
@pytest.mark.parametrize("drafts", [True, False])
def test_they_are_those_of_one_pass(chunk: int, drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PROMPT_ROWS", 5)
    engine = engine_of(random_chain(TINY.vocab_size) if drafts else None, max_batched_tokens=chunk)
    first, *rest = outputs_of(engine, request("r", LONG, max_tokens=6, prompt_logprobs=3, **SAMPLED))
    assert_equal(first.prompt_logprobs, expected(LONG, 3))
    assert all(output.prompt_logprobs is None for output in rest)
    assert tokens_of([first, *rest]) == tokens_of(outputs_of(engine_of(), request("r", LONG, max_tokens=6, **SAMPLED)))


def test_a_cached_prompt_is_computed_again() -> None:
    engine = engine_of()
    outputs_of(engine, request("a", LONG, max_tokens=1))
    first, *_ = outputs_of(engine, request("b", LONG, max_tokens=1, prompt_logprobs=0))
    assert_equal(first.prompt_logprobs, expected(LONG, 0))
    assert first.num_cached == 0


def test_the_first_choice_alone_has_them() -> None:
    outputs = outputs_of(engine_of(), request("r", LONG, max_tokens=3, n=2, prompt_logprobs=1))
    assert [o.choice for o in outputs if o.prompt_logprobs is not None] == [0]


def test_other_requests_of_the_batch_have_none() -> None:
    outputs = outputs_of(
        engine_of(), request("a", LONG, max_tokens=3, prompt_logprobs=1), request("b", LONG[::-1], max_tokens=3)
    )
    with_scores = [o for o in outputs if o.prompt_logprobs is not None]
    assert [o.request_id for o in with_scores] == ["a"]
    assert_equal(with_scores[0].prompt_logprobs, expected(LONG, 1))


def test_a_prompt_of_one_token_has_none_to_report() -> None:
    first, *_ = outputs_of(engine_of(), request("r", (5,), max_tokens=1, prompt_logprobs=1))
    assert first.prompt_logprobs == ()


def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.requests.validator.MAX_PROMPT_SCORES", 40)
    with pytest.raises(InvalidRequest, match="prompt_logprobs has 96 values"):
        engine_of().validate(request("r", LONG, prompt_logprobs=1))


def test_ranks_count_from_one() -> None:
    (one,) = logprobs(torch.tensor([[0.0, 2.0, 1.0]]), [2], 1)
    assert (one.rank, one.top[0][0]) == (2, 1)
    assert math.isclose(one.logprob, 1.0 - math.log(1 + math.e + math.e**2), abs_tol=1e-6)
