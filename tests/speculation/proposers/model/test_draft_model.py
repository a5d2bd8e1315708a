"""After any history of commits a draft model drafts what a new one would."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.core.request import SamplingParams, Verification
from paceline.models.decoder.forward import DecoderModel
from paceline.models.runner.runner import ModelRunner, Span
from paceline.speculation.distribution.distribution import log_distribution, pick
from paceline.speculation.drafts.drafts import Draft, DraftPrefill
from paceline.speculation.proposer import SequenceProgress
from paceline.speculation.proposers.model.draft_model import DraftModelProposer
from paceline.speculation.rows.rows import RowContext
from tests.exactness.suite import mixed_requests, next_logits, plain_text
from tests.fakes import TINY, MixedDepth, draft_model, request, run, tiny_engine, tiny_model
from tests.specs import changed

MODEL = tiny_model()
VOCAB = TINY.vocab_size
LONG = [i * 7 % VOCAB for i in range(50)]
GREEDY = SamplingParams(temperature=0.0)


class CountedRunner(ModelRunner):
    """Records (context length, number of tokens) of every span of every pass."""

    def __init__(self, model: DecoderModel, num_blocks: int) -> None:
        super().__init__(model, num_blocks)
        self.passes: list[list[tuple[int, int]]] = []

    def forward(self, spans: Sequence[Span], state_layers: tuple[int, ...] = ()) -> Any:
        self.passes.append([(span.context_len, len(span.tokens)) for span in spans])
        return super().forward(spans, state_layers)


def proposer(
    num_blocks: int = 64, max_rows: int = 64, model: DecoderModel = MODEL, max_gap: int | None = None
) -> DraftModelProposer:
    runner = CountedRunner(model, num_blocks)
    return DraftModelProposer(runner, max_rows, model.config.vocab_size, VOCAB, max_gap=max_gap)


def passes(drafting: DraftModelProposer) -> list[list[tuple[int, int]]]:
    """Passes since the last call."""
    runner: Any = drafting.drafter.runner
    done, runner.passes = runner.passes, []
    return done


def progress(
    ids: list[int],
    depth: int,
    sequence_id: int = 0,
    sampling: SamplingParams = GREEDY,
    seed: int = 5,
    verification: Verification = "coupled",
    salt: str = "",
    num_prompt: int = 1,
) -> SequenceProgress:
    return SequenceProgress(sequence_id, ids, depth, sampling, seed, 0, num_prompt, verification, salt)


def drafts(drafting: DraftModelProposer, *batch: SequenceProgress) -> dict[int, Draft]:
    drafting.observe(batch)
    return drafting.collect([one.sequence_id for one in batch], deadline=0.0).split()


def draft(drafting: DraftModelProposer, one: SequenceProgress) -> list[int]:
    answer = drafts(drafting, one).get(one.sequence_id)
    return [] if answer is None else list(answer.tokens)


def expected(one: SequenceProgress, model: DecoderModel = MODEL) -> list[int]:
    """The draft computed with one pass over the whole text for each token."""
    path: list[int] = []
    for _ in range(one.depth):
        position = len(one.ids) + len(path)
        row = RowContext(one.sampling, one.seed, one.choice, position, one.ids, one.num_prompt, tuple(path))
        path.append(int(pick(next_logits(model, [*one.ids, *path]).unsqueeze(0), [row])))
    return path


def test_draft_is_the_continuation_of_the_model() -> None:
    for sampling in (GREEDY, SamplingParams(), SamplingParams(temperature=0.8, top_k=5, repetition_penalty=1.3)):
        one = progress(LONG[:21], 5, sampling=sampling)
        assert draft(proposer(), one) == expected(one)


def test_depth_0_costs_nothing() -> None:
    drafting = proposer()
    ids = list(LONG)
    for _ in range(3):
        assert drafts(drafting, progress(ids, 0), progress(ids, 0, 1)) == {}
        ids.append(3)
    assert passes(drafting) == []
    assert drafting.num_free_blocks == 64
    assert drafting.collect([7], 0.0).split() == {}  # never observed


def test_only_the_sequences_that_draft_are_computed() -> None:
    drafting = proposer()
    assert set(drafts(drafting, progress(LONG[:5], 0), progress(LONG[:6], 2, 1))) == {1}
    assert passes(drafting) == [[(0, 5)], [(5, 1)], [(6, 1)]]


def test_cache_lacks_two_tokens_after_full_acceptance() -> None:
    drafting, ids = proposer(), LONG[:5]
    tokens = draft(drafting, progress(ids, 3))
    assert passes(drafting) == [[(0, 4)], [(4, 1)], [(5, 1)], [(6, 1)]]  # the last drafted token is never computed
    ids += [*tokens, 9]
    assert draft(drafting, progress(ids, 3)) == expected(progress(ids, 3))
    assert passes(drafting)[0] == [(7, 2)]  # that token and the bonus


def test_cache_is_rolled_back_after_a_rejection() -> None:
    drafting, ids = proposer(), LONG[:5]
    tokens = draft(drafting, progress(ids, 4))
    passes(drafting)
    ids += [tokens[0], (tokens[1] + 1) % VOCAB]
    assert draft(drafting, progress(ids, 2)) == expected(progress(ids, 2))
    assert passes(drafting) == [[(6, 1)], [(7, 1)]]


def test_blocks_of_rejected_drafts_are_freed() -> None:
    drafting, ids = proposer(), LONG[:14]
    draft(drafting, progress(ids, 20))
    assert drafting.num_free_blocks == 64 - 3
    ids.append(3)
    drafting.observe([progress(ids, 0)])
    assert drafting.num_free_blocks == 64 - 1


def test_unverified_draft_is_dropped() -> None:
    drafting, ids = proposer(), LONG[:5]
    first = draft(drafting, progress(ids, 4))
    passes(drafting)
    assert draft(drafting, progress(ids, 4)) == first
    assert passes(drafting)[0] == [(4, 1)]


def test_tokens_decoded_without_drafts_are_computed_later() -> None:
    drafting, ids = proposer(), LONG[:5]
    draft(drafting, progress(ids, 2))
    passes(drafting)
    for token in (1, 2, 3, 4):
        ids.append(token)
        drafting.observe([progress(ids, 0)])
    assert passes(drafting) == []
    assert draft(drafting, progress(ids, 2)) == expected(progress(ids, 2))
    assert sum(count for spans in passes(drafting) for _, count in spans) == 4 + 1


def test_long_prompt_is_computed_within_a_budget() -> None:
    drafting, other = proposer(max_rows=20), LONG[3:9]
    assert (
        set(drafts(drafting, progress(LONG, 2), progress(other, 2, 1))) == set()
    )  # 20 of 49 rows, none left for the other
    assert passes(drafting) == [[(0, 20)]]
    assert set(drafts(drafting, progress(LONG, 2), progress(other, 2, 1))) == set()
    assert set(drafts(drafting, progress(LONG, 2), progress(other, 2, 1))) == {0, 1}
    assert passes(drafting)[:2] == [[(20, 20)], [(40, 9), (0, 5)]]


def test_draft_prefill_may_take_several_passes() -> None:
    drafting, other = proposer(max_rows=20, max_gap=60), LONG[3:9]
    assert drafts(drafting, progress(LONG, 2), progress(other, 2, 1))[0].tokens == tuple(expected(progress(LONG, 2)))
    assert passes(drafting)[:4] == [[(0, 20)], [(20, 20)], [(40, 9), (0, 5)], [(49, 1), (5, 1)]]


def draft_prefill(drafting: DraftModelProposer, one: SequenceProgress) -> DraftPrefill:
    drafting.observe([one])
    return drafting.collect([one.sequence_id], deadline=0.0).cost.prefill


def test_batch_reports_its_draft_prefill() -> None:
    drafting = proposer()
    first = draft_prefill(drafting, progress(LONG, 2))
    assert first.tokens == len(LONG) - 1
    assert first.seconds > 0.0
    assert draft_prefill(drafting, progress([*LONG, 3], 2)) == DraftPrefill()  # the cache is up to date
    assert draft_prefill(drafting, progress(LONG, 2, 1)).tokens == 48  # found in the cache


def test_prefixes_are_shared_under_one_salt() -> None:
    drafting = proposer()
    reference = expected(progress(LONG, 3))
    for sequence_id, salt, start in ((0, "", 0), (1, "", 48), (2, "other", 0), (3, "other", 48)):
        assert draft(drafting, progress(LONG, 3, sequence_id, salt=salt)) == reference
        assert passes(drafting)[0][0][0] == start
    drafting.close([0, 1, 2, 3])
    assert drafting.num_free_blocks == 64
    assert draft(drafting, progress(LONG, 3, 4)) == reference
    assert passes(drafting)[0] == [(48, 2)]


def test_drafted_tokens_are_not_in_the_prefix_cache() -> None:
    """A block is published when its tokens are committed, not when they are drafted."""
    drafting, ids = proposer(), LONG[:14]
    tokens = draft(drafting, progress(ids, 8))  # fills the first block with drafts
    assert drafting.drafter.tables.pool.num_cached == 0
    other = [*ids, *tokens, 1]
    passes(drafting)
    assert draft(drafting, progress(other, 2, 1)) == expected(progress(other, 2, 1))
    assert passes(drafting)[0][0] == (0, len(other) - 1)


def test_sequence_without_free_blocks_gets_no_draft() -> None:
    drafting = proposer(num_blocks=3)
    assert drafts(drafting, progress(LONG, 4)) == {}
    short = LONG[:20]
    assert drafts(drafting, progress(LONG, 4), progress(short, 4, 1))[1].tokens == tuple(expected(progress(short, 4)))
    assert drafts(drafting, progress(LONG[1:], 4, 2)) == {}
    drafting.close([0, 1, 2])
    assert drafting.num_free_blocks == 3
    drafting.drafter.tables.pool.check()


def test_sequence_drafts_when_blocks_become_free() -> None:
    drafting = proposer(num_blocks=4)
    assert set(drafts(drafting, progress(LONG[:40], 2), progress(LONG[1:41], 2, 1))) == {0}
    drafting.close([0])
    assert draft(drafting, progress(LONG[1:41], 2, 1)) == expected(progress(LONG[1:41], 2, 1))


def test_close_frees_blocks_and_may_be_repeated() -> None:
    drafting = proposer()
    drafts(drafting, progress(LONG, 3), progress(LONG[::-1], 3, 1))
    assert drafting.num_free_blocks < 64
    drafting.close([0, 1, 99])
    drafting.close([0])
    assert drafting.num_free_blocks == 64
    assert drafting.collect([0, 1], 0.0).split() == {}
    drafting.drafter.tables.pool.check()


def test_rejection_returns_the_draft_distributions() -> None:
    sampled = SamplingParams(temperature=0.7, top_k=6)
    batch = [
        progress(LONG[:9], 3, 0, sampled, verification="rejection"),
        progress(LONG[:7], 2, 1, sampled),  # coupled: one-hot
        progress(LONG[:5], 2, 2, GREEDY, verification="rejection"),
    ]
    answers = drafts(proposer(), *batch)
    for one in batch:
        answer = answers[one.sequence_id]
        q = answer.q(VOCAB)
        assert q is not None
        torch.testing.assert_close(q.sum(1), torch.ones(len(answer)))
        for step, token in enumerate(answer.tokens):
            path = answer.tokens[:step]
            row = RowContext(one.sampling, one.seed, 0, len(one.ids) + step, one.ids, one.num_prompt, path)
            if one.sequence_id == 0:
                logits = next_logits(MODEL, [*one.ids, *path]).unsqueeze(0)
                torch.testing.assert_close(q[step], log_distribution(logits, [row])[0].exp())
                assert q[step, token] > 0
            else:
                assert (q[step, token], int(q[step].count_nonzero())) == (1.0, 1)


def test_coupled_drafts_carry_no_probabilities() -> None:
    assert drafts(proposer(), progress(LONG[:9], 3, sampling=SamplingParams()))[0].probs is None


@pytest.mark.parametrize(
    ("num_blocks", "max_rows", "max_gap"),
    [(64, 64, None), (64, 12, None), (14, 64, None), (14, 12, None), (8, 64, None), (64, 12, 31), (14, 12, 31)],
)
@pytest.mark.parametrize("seed", range(3))
def test_any_history_drafts_like_a_new_model(num_blocks: int, max_rows: int, max_gap: int | None, seed: int) -> None:
    """Random commits, depths, new and closed sequences, steps without speculation, and caches that are too small."""
    rng = random.Random(seed)
    drafting = proposer(num_blocks, max_rows, max_gap=max_gap)
    samplings = (GREEDY, SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=0.5))
    texts: dict[int, tuple[list[int], SamplingParams, str]] = {}
    answers: dict[int, Draft] = {}
    numbers, compared = iter(range(1000)), 0
    for _ in range(30):
        while len(texts) < 3:
            start = rng.choice((LONG[:33], LONG[:17], []))
            ids = [*start, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20)))]
            texts[next(numbers)] = ids, rng.choice(samplings), rng.choice(("", "salt"))
        for i, (ids, _, _) in texts.items():  # accept a drafting of the draft, then commit other tokens
            tokens = answers[i].tokens if i in answers else ()
            ids += [*tokens[: rng.randint(0, len(tokens))], *([rng.randrange(VOCAB)] * rng.choice((1, 1, 1, 5)))]
        depths = {i: rng.choice((0, 1, 3, 6)) for i in texts}
        batch = [progress(ids, depths[i], i, sampling, salt=salt) for i, (ids, sampling, salt) in texts.items()]
        if rng.random() < 0.8:  # otherwise speculation is off in this step
            answers = drafts(drafting, *batch)
        else:
            answers = {}
        for one in batch:
            if one.sequence_id in answers:
                assert list(answers[one.sequence_id].tokens) == expected(one)
                compared += 1
        for i in list(texts):
            if rng.random() < 0.1 or len(texts[i][0]) > 100:
                drafting.close([i])
                del texts[i]
        drafting.drafter.tables.pool.check()
    drafting.close(list(texts))
    assert drafting.num_free_blocks == drafting.drafter.runner.num_blocks
    assert compared > 5


# --- drafts with another vocabulary or window than their target


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_smaller_vocabulary(verification: str) -> None:
    """Prompts and outputs hold tokens that the draft does not have."""
    small = tiny_model(config=changed(TINY, vocab_size=30))
    drafting = proposer(model=small)
    engine = tiny_engine(MODEL, drafting, MixedDepth(5))
    requests = mixed_requests(8, VOCAB, verification=verification)
    result = run(engine, requests)
    assert result.drafted > 50
    assert any(token >= 30 for one in requests for token in one.prompt_ids)
    if verification == "coupled":
        assert result.tokens == plain_text(MODEL, requests)


def test_only_known_tokens_are_drafted() -> None:
    drafting = proposer(model=tiny_model(config=changed(TINY, vocab_size=30)))
    sampled = SamplingParams(logit_bias=dict.fromkeys(range(30, 40), 100.0), repetition_penalty=1.5)
    for i, verification in enumerate(("coupled", "rejection")):
        one = drafts(drafting, progress([35, 3, 39, 2], 6, i, sampled, verification=verification))[i]
        assert all(token < 30 for token in one.tokens)
        q = one.q(VOCAB)
        assert (q is None) == (verification == "coupled")
        assert q is None or float(q[:, 30:].sum()) == 0.0


def test_larger_vocabulary() -> None:
    padded = tiny_model(config=changed(TINY, vocab_size=48))
    drafting = DraftModelProposer(ModelRunner(padded, 64), 64, VOCAB, VOCAB)
    requests = mixed_requests(6, VOCAB)
    assert run(tiny_engine(MODEL, drafting, depth=4), requests).tokens == plain_text(MODEL, requests)


def test_shorter_window_ends_the_drafts_but_not_the_text() -> None:
    drafting = proposer(model=tiny_model(config=changed(TINY, max_position=32)))
    one = request("r", LONG[:10], max_tokens=60, temperature=0.0)
    result = run(tiny_engine(MODEL, drafting, depth=4), [one])
    assert result.tokens == plain_text(MODEL, [one])
    assert result.accepted == result.drafted >= 16
    assert max(start + count for spans in passes(drafting) for start, count in spans) <= 32
    exact = LONG[:29]
    assert len(draft(drafting, progress(exact, 4, 1))) == 4  # computes positions up to 31
    assert draft(drafting, progress(exact, 5, 2)) == []


def test_engine_and_draft_have_separate_blocks() -> None:
    drafting = draft_model(MODEL, num_blocks=8)
    engine = tiny_engine(MODEL, drafting, depth=4)
    engine.add(request("r", LONG, max_tokens=30, seed=1))
    for _ in range(4):
        engine.step()
    assert drafting.num_free_blocks < 8
    engine.cancel("r")
    assert drafting.num_free_blocks == 8
