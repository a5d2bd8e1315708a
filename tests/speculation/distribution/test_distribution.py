"""`log_distribution` and `pick` against a slow obvious reimplementation, and the promises around it."""

import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.core.request import SamplingParams
from paceline.speculation.distribution.distribution import log_distribution, logprobs, pick, sample_draft, truncate
from paceline.speculation.drafts.drafts import Draft
from paceline.speculation.rows.noise import Purpose, gumbel
from paceline.speculation.rows.rows import RowContext, row_contexts

VOCAB = 40


def row(params: SamplingParams, position: int = 8, path: tuple[int, ...] = (), **more: object) -> RowContext:
    return RowContext(params, 11, 0, position, [3, 5, 5, 7, 2, 2, 2, 9], 3, path, **more)  # type: ignore[arg-type]


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 3, 12, 100]),
        top_p=rng.choice([1.0, 1.0, 0.3, 0.8, 0.99]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, -0.4]),
        logit_bias=rng.choice([{}, {4: 2.5, 5: -100.0}]),
    )


def random_mask(rng: random.Random) -> tuple[torch.Tensor, list[bool]]:
    allowed = [rng.random() < 0.7 for _ in range(VOCAB)]
    allowed[rng.randrange(VOCAB)] = True
    words = [sum(1 << b for b in range(32) if w * 32 + b < VOCAB and allowed[w * 32 + b]) for w in range(2)]
    return torch.tensor([w - 2**32 if w >= 2**31 else w for w in words], dtype=torch.int32), allowed


def slow(logits: list[float], context: RowContext, allowed: list[bool] | None) -> list[float]:
    """Probabilities of one row, one token at a time."""
    params, x = context.params, list(logits)
    everything = [*context.ids, *context.path]
    output = everything[context.num_prompt :]
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in set(everything):
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if allowed is not None:
        x = [value if ok else -math.inf for value, ok in zip(x, allowed, strict=True)]
    best = max(x)
    if params.is_greedy:
        return [float(t == x.index(best)) for t in range(len(x))]
    weights = [math.exp((value - best) / params.temperature) for value in x]
    ranking = sorted((t for t in range(len(x)) if weights[t] > 0), key=lambda t: (-weights[t], t))
    ranking = [t for t in ranking if weights[t] >= params.min_p]
    ranking = ranking[: params.top_k or None]
    total, mass, kept = sum(weights[t] for t in ranking), 0.0, []
    for token in ranking:
        if params.top_p < 1.0 and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    return [weights[t] / mass if t in kept else 0.0 for t in range(len(x))]


@pytest.fixture(scope="module")
def cases() -> tuple[torch.Tensor, list[RowContext], list[list[bool] | None]]:
    rng = random.Random(0)
    rows, masks = [], []
    for i in range(400):
        mask, allowed = random_mask(rng) if rng.random() < 0.3 else (None, None)
        path = tuple(rng.choices(range(VOCAB), k=rng.randrange(4)))
        rows.append(row(random_params(rng), 8 + i, path, mask=mask))
        masks.append(allowed)
    logits = torch.randn(400, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    return logits, rows, masks


def test_agrees_with_the_slow_one(cases: tuple[torch.Tensor, list[RowContext], list[list[bool] | None]]) -> None:
    logits, rows, masks = cases
    p = log_distribution(logits, rows).exp()
    for i, context in enumerate(rows):
        expected = torch.tensor(slow(logits[i].tolist(), context, masks[i]))
        assert torch.equal(p[i] > 0, expected > 0), context.params
        assert torch.allclose(p[i], expected, atol=1e-5), context.params


def test_pick_is_gumbel_max_of_the_distribution(
    cases: tuple[torch.Tensor, list[RowContext], list[list[bool] | None]],
) -> None:
    logits, rows, _ = cases
    scores = log_distribution(logits, rows)
    noise = gumbel([context.key for context in rows], Purpose.SHARED, VOCAB, torch.device("cpu"))
    assert torch.equal(pick(logits, rows), (scores + noise).argmax(1))


def test_rows_do_not_depend_on_their_batch(
    cases: tuple[torch.Tensor, list[RowContext], list[list[bool] | None]],
) -> None:
    logits, rows, _ = cases
    together, picks = log_distribution(logits, rows), pick(logits, rows)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1)).tolist()
    for size in (1, 3, 17):
        for start in range(0, 120, size):
            some = order[start : start + size]
            assert torch.equal(log_distribution(logits[some], [rows[i] for i in some]), together[some])
            assert torch.equal(pick(logits[some], [rows[i] for i in some]), picks[some])


def test_rows_of_a_real_vocabulary_do_not_depend_on_their_batch() -> None:
    size = 49_157  # no multiple of any vector width
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(0)) * 3
    kinds = [
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.1, "top_p": 0.5},
        {"top_k": 300, "top_p": 0.9},
        {"top_p": 0.2},
    ]
    rows = [row(SamplingParams(**kind), 100 + i) for i, kind in enumerate(kinds)]  # type: ignore[arg-type]
    together, picks = log_distribution(logits, rows), pick(logits, rows)
    for i in range(6):
        assert torch.equal(log_distribution(logits[i : i + 1], rows[i : i + 1])[0], together[i])
        assert pick(logits[i : i + 1], rows[i : i + 1])[0] == picks[i]


@pytest.mark.parametrize("flat", [False, True])
def test_candidates_and_full_sort_keep_the_same_tokens(flat: bool) -> None:
    """Coarse scores, so that ties cross every boundary; flat ones, so that few candidates are not enough."""
    scores = torch.randn(60, 3000, generator=torch.Generator().manual_seed(2)) * (0.3 if flat else 4.0)
    scores = (scores * 4).round() / 4
    scores -= scores.amax(1, keepdim=True)
    rng = random.Random(3)
    params = [
        SamplingParams(top_k=rng.choice([0, 5, 40]), top_p=rng.choice([0.5, 0.9, 1.0]), min_p=rng.choice([0.0, 0.1]))
        for _ in range(60)
    ]

    def kept(width: int) -> dict[int, list[int]]:
        result = {}
        for group in truncate(scores, params, width):
            for r, tokens, values in zip(group.rows.tolist(), group.tokens, group.scores, strict=True):
                result[r] = tokens[values > -torch.inf].tolist()
        return result

    assert kept(16) == kept(256) == kept(3000)


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(1, 1000)
    for params in (SamplingParams(top_k=4), SamplingParams(top_p=0.004)):
        assert log_distribution(logits, [row(params)])[0].exp().nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_logits_are_left_alone() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    rows = [row(SamplingParams(logit_bias={1: 5.0}, repetition_penalty=1.5)), row(SamplingParams(top_k=3))]
    pick(logits, rows)
    log_distribution(logits, rows)
    assert torch.equal(logits, before)


def test_low_temperature_is_greedy_without_nan() -> None:
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(0)) * 30
    rows = [row(SamplingParams(temperature=1e-4), i) for i in range(50)]
    assert torch.equal(pick(logits, rows), logits.argmax(1))
    assert not log_distribution(logits, rows).isnan().any()


def test_greedy_sees_penalties_bias_and_grammar() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 2.0
    assert pick(logits, [row(SamplingParams(temperature=0.0))]).item() == 4
    assert pick(logits, [row(SamplingParams(temperature=0.0, logit_bias={6: 3.0}))]).item() == 6
    only_33 = torch.tensor([0, 2], dtype=torch.int32)
    assert pick(logits, [row(SamplingParams(temperature=0.0), mask=only_33)]).item() == 33
    penalised = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0)
    assert pick(logits, [row(penalised, path=(4,))]).item() == 0
    assert pick(logits, [row(penalised)]).item() == 4


def test_bf16_logits() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = [row(SamplingParams(), i) for i in range(4)]
    assert torch.equal(pick(logits, rows), pick(logits.float(), rows))
    assert log_distribution(logits, rows).dtype == torch.float32


def test_a_draft_is_drawn_from_the_q_it_reports() -> None:
    count = 30_000
    params = SamplingParams(temperature=0.8, top_k=4)
    logits = torch.tensor([1.0, 0.5, 0.4, 0.0, -0.2, -1.0]).repeat(count, 1)
    tokens, q = sample_draft(logits, [row(params, i) for i in range(count)])
    assert torch.equal(q, q[:1].expand_as(q))
    assert (q[0] > 0).sum() == 4
    observed = torch.bincount(tokens, minlength=6).numpy()
    expected = q[0].double().numpy() / q[0].double().sum().item() * count
    assert observed[4:].sum() == 0
    assert stats.chisquare(observed[:4], expected[:4]).pvalue > 1e-3
    shared = pick(logits, [row(params, i) for i in range(count)])
    agreement = (shared == tokens).double().mean().item()
    assert agreement == pytest.approx(float(np.square(q[0].double().numpy()).sum()), abs=0.02)  # independent streams


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 1.0]])
    first, second = logprobs(logits, [3, 0], 2)
    expected = logits.log_softmax(1)
    assert first.token == 3
    assert first.logprob == pytest.approx(expected[0, 3].item())
    assert [token for token, _ in first.top] == [1, 2]
    assert second.top[0] == (0, pytest.approx(expected[1, 0].item()))
    assert logprobs(logits, [3, 0], 0)[0].top == ()


def test_row_contexts_follow_the_tree() -> None:
    class Sequence:
        ids = (1, 2, 3)
        num_prompt, sampling, seed, choice = 2, SamplingParams(), 5, 1

    rows = row_contexts(Sequence(), Draft((7, 8, 9, 6), (-1, -1, 0, 2)))
    assert [r.position for r in rows] == [3, 4, 4, 5, 6]
    assert [r.path for r in rows] == [(), (7,), (8,), (7, 9), (7, 9, 6)]
    assert rows[4].key == (5, 1, 6)
