from collections import Counter

import pytest
import torch
from scipy import stats

from paceline.core.request import SamplingParams
from paceline.drafting import branches as distributions
from paceline.drafting.branches import MAX_TOKENS, TOTAL_WEIGHT, DraftDistribution
from paceline.drafting.drafts import DraftChain, TreeSplit, to_draft_batch
from paceline.speculation.rows.rows import RowContext
from paceline.wire.codec import MalformedMessage

VOCAB = 1000


def rows(count, **sampling):
    return [RowContext(SamplingParams(**sampling), seed, 0, 5, [1, 2], 2) for seed in range(count)]


def distribution(tokens, weights):
    return DraftDistribution(torch.tensor(tokens, dtype=torch.int64), torch.tensor(weights, dtype=torch.int64))


def test_sampled_token_has_weight_in_its_distribution():
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    for token, q in distributions.sample(logits, rows(8)):
        assert int(q.weights.sum()) == TOTAL_WEIGHT
        assert int(q.weights.min()) > 0
        assert len(q.tokens) <= MAX_TOKENS
        assert token in q.tokens.tolist()


def test_tokens_follow_the_quantised_distribution():
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1)).mul(1.5).expand(8_000, 30)
    sampled = distributions.sample(logits, rows(8_000))
    q = sampled[0][1]
    counts = Counter(token for token, _ in sampled)
    expected = q.weights.double() / TOTAL_WEIGHT * len(sampled)
    observed = [counts[token] for token in q.tokens.tolist()]
    assert stats.chisquare(observed, expected.numpy()).pvalue > 1e-3


def test_top_k_applies_before_quantisation():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    for _, q in distributions.sample(logits, rows(4, top_k=3)):
        assert len(q.tokens) <= 3


def test_encoded_distributions_are_small_and_decode_alike():
    flat = torch.zeros(7, 128_000)  # the largest: every entry is used
    sampled = distributions.sample(flat, rows(7))
    data = distributions.encode([q for _, q in sampled])
    assert len(data) < 3500
    back = distributions.decode(data, [token for token, _ in sampled], 128_000)
    for (_, sent), received in zip(sampled, back, strict=True):
        assert torch.equal(sent.tokens, received.tokens)
        assert torch.equal(sent.weights, received.weights)


@pytest.mark.parametrize(
    "wrong",
    [
        distribution([1, 2], [TOTAL_WEIGHT - 1, 2]),
        distribution([1, 1], [TOTAL_WEIGHT - 1, 1]),
        distribution([1, VOCAB], [TOTAL_WEIGHT - 1, 1]),
        distribution([1, 2], [TOTAL_WEIGHT, 0]),
        distribution([2, 3], [TOTAL_WEIGHT - 1, 1]),
        distribution([], []),
        distribution(list(range(1, MAX_TOKENS + 2)), [TOTAL_WEIGHT - MAX_TOKENS] + [1] * MAX_TOKENS),
    ],
)
def test_invalid_distribution_is_rejected(wrong):
    with pytest.raises(MalformedMessage):
        distributions.decode(distributions.encode([wrong]), [1], VOCAB)


def test_bytes_of_a_wrong_length_are_rejected():
    good = distributions.encode([distribution([1, 2], [TOTAL_WEIGHT - 1, 1])])
    assert len(distributions.decode(good, [1], VOCAB)) == 1
    for data, tokens in ((good, [1, 2]), (good + b"x", [1]), (good[:-1], [1]), (b"", [1])):
        with pytest.raises(MalformedMessage):
            distributions.decode(data, tokens, VOCAB)


def test_chains_with_and_without_distributions_share_a_batch():
    batch = to_draft_batch(
        {
            7: DraftChain((3, 4), ()),
            8: DraftChain((5,), (distribution([5, 6], [TOTAL_WEIGHT // 4, 3 * TOTAL_WEIGHT // 4]),)),
            9: DraftChain((), ()),
        },
        TreeSplit(),
    )
    drafts = batch.split()
    assert list(drafts) == [7, 8]
    coupled, rejection = drafts[7].q(10), drafts[8].q(10)
    assert coupled is not None
    assert rejection is not None
    assert coupled.argmax(1).tolist() == [3, 4]
    assert coupled.sum(1).tolist() == [1.0, 1.0]
    assert (rejection[0, 5].item(), rejection[0, 6].item()) == (0.25, 0.75)
    assert to_draft_batch({7: DraftChain((3,), ())}, TreeSplit()).probs is None
