from collections import Counter

import pytest
import torch
from scipy import stats

from paceline.core.sampling import SamplingParams
from paceline.runtime.draft_pool.drafts import Chain, batch_of
from paceline.runtime.draft_worker import distributions as laws
from paceline.runtime.draft_worker.distributions import TOTAL, WIDTH, Law
from paceline.runtime.wire.codec import Malformed
from paceline.speculation.verification.rows import RowContext

VOCAB = 1000


def rows(count, **sampling):
    return [RowContext(SamplingParams(**sampling), seed, 0, 5, [1, 2], 2) for seed in range(count)]


def law(tokens, weights):
    return Law(torch.tensor(tokens, dtype=torch.int64), torch.tensor(weights, dtype=torch.int64))


def test_a_law_is_a_distribution_and_its_token_comes_from_it():
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    for token, drawn in laws.draw(logits, rows(8)):
        assert int(drawn.weights.sum()) == TOTAL
        assert int(drawn.weights.min()) > 0
        assert len(drawn.tokens) <= WIDTH
        assert token in drawn.tokens.tolist()


def test_tokens_are_drawn_from_exactly_the_law():
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1)).mul(1.5).expand(8_000, 30)
    drawn = laws.draw(logits, rows(8_000))
    one = drawn[0][1]
    counts = Counter(token for token, _ in drawn)
    expected = one.weights.double() / TOTAL * len(drawn)
    observed = [counts[token] for token in one.tokens.tolist()]
    assert stats.chisquare(observed, expected.numpy()).pvalue > 1e-3


def test_truncation_comes_first():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    for _, drawn in laws.draw(logits, rows(4, top_k=3)):
        assert len(drawn.tokens) <= 3


def test_there_and_back_below_the_limit():
    flat = torch.zeros(7, 128_000)  # the worst: every entry is used
    drawn = laws.draw(flat, rows(7))
    data = laws.encode([one for _, one in drawn])
    assert len(data) < 3500
    back = laws.decode(data, [token for token, _ in drawn], 128_000)
    for (_, sent), got in zip(drawn, back, strict=True):
        assert torch.equal(sent.tokens, got.tokens)
        assert torch.equal(sent.weights, got.weights)


@pytest.mark.parametrize(
    "wrong",
    [
        law([1, 2], [TOTAL - 1, 2]),
        law([1, 1], [TOTAL - 1, 1]),
        law([1, VOCAB], [TOTAL - 1, 1]),
        law([1, 2], [TOTAL, 0]),
        law([2, 3], [TOTAL - 1, 1]),
        law([], []),
        law(list(range(1, WIDTH + 2)), [TOTAL - WIDTH] + [1] * WIDTH),
    ],
)
def test_what_is_no_law_of_that_token_is_refused(wrong):
    with pytest.raises(Malformed):
        laws.decode(laws.encode([wrong]), [1], VOCAB)


def test_bytes_that_do_not_fit_the_chain_are_refused():
    good = laws.encode([law([1, 2], [TOTAL - 1, 1])])
    assert len(laws.decode(good, [1], VOCAB)) == 1
    for data, tokens in ((good, [1, 2]), (good + b"x", [1]), (good[:-1], [1]), (b"", [1])):
        with pytest.raises(Malformed):
            laws.decode(data, tokens, VOCAB)


def test_chains_with_and_without_laws_share_a_batch():
    batch = batch_of(
        {7: Chain((3, 4), ()), 8: Chain((5,), (law([5, 6], [TOTAL // 4, 3 * TOTAL // 4]),)), 9: Chain((), ())}
    )
    drafts = batch.split()
    assert list(drafts) == [7, 8]
    coupled, rejection = drafts[7].q(10), drafts[8].q(10)
    assert coupled is not None
    assert rejection is not None
    assert coupled.argmax(1).tolist() == [3, 4]
    assert coupled.sum(1).tolist() == [1.0, 1.0]
    assert (rejection[0, 5].item(), rejection[0, 6].item()) == (0.25, 0.75)
    assert batch_of({7: Chain((3,), ())}).probs is None
