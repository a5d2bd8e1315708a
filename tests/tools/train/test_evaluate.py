import pytest
import torch
from torch import Tensor

from paceline.tools.train.drafts import DistilledDraft, Draft, EagleDraft, MedusaDraft, Predictions
from paceline.tools.train.evaluate import (
    NO_RANK,
    Score,
    answers,
    best_tree,
    coupled_noise,
    evaluate,
    rank_frequencies,
    replay,
    round_ranks,
    token_ranks,
)
from paceline.tools.train.layers import DraftVocabulary, LayerShape
from paceline.tools.train.target import States, Target
from paceline.tools.train.text_files import Text
from tests.tools.train.test_eagle import CAPTURE, one_round
from tests.tools.train.tiny import VOCAB, some_ids


def drafts(target: Target) -> dict[str, Draft]:
    torch.manual_seed(3)
    medusa = MedusaDraft(32, 3)
    for parameter in medusa.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    shape = LayerShape.of(target.config)
    return {"eagle": EagleDraft(shape, CAPTURE), "medusa": medusa, "distilled": DistilledDraft(shape, 1)}


def round_hidden(kind: str, draft: Draft, target: Target, ids: Tensor, last: int, depth: int) -> list[Tensor]:
    """The hidden states of one round, computed only from the tokens known in it."""
    states = target.states(ids[:, : last + depth + 1], draft.state_layers)
    if kind == "eagle":
        assert isinstance(draft, EagleDraft)
        return one_round(draft, target, states, last, depth)
    if kind == "medusa":
        h = states.last[0, last - 1]
        return [h + torch.nn.functional.silu(draft.heads[str(k)](h)) for k in range(1, depth + 1)]
    known = [target.states(ids[:, : last + 1 + u]) for u in range(depth)]
    return [draft.predict(target, part, 1).hidden[0, 0, -1] for part in known]


@pytest.mark.parametrize("kind", ["eagle", "medusa", "distilled"])
@pytest.mark.parametrize("reduced", [False, True])
def test_ranks_match_rounds_drafted_one_by_one(kind: str, reduced: bool, target: Target) -> None:
    draft, ids = drafts(target)[kind], some_ids(1, 20)
    vocabulary = DraftVocabulary(VOCAB, torch.arange(0, VOCAB, 2) if reduced else None)
    head = vocabulary.head(target.head)
    ranks = round_ranks(token_ranks(draft, target, head, vocabulary, ids, 3), draft, 3)  # [3, 1, S]
    for last in (1, 5, 13):
        with torch.no_grad():
            rounds = round_hidden(kind, draft, target, ids, last, 3)
        for u, hidden in enumerate(rounds):
            order = (hidden @ head.T).argsort(descending=True)
            names = order if vocabulary.ids is None else vocabulary.ids[order]
            where = (names == ids[0, last + 1 + u]).nonzero()
            assert ranks[u, 0, last] == (where.item() if len(where) else NO_RANK)


def test_replay_counts_rounds_and_conditional_acceptance() -> None:
    #       round after:   0      1  2  3      4      5  6
    ranks = [[NO_RANK, 0, 9, 9, 1, 9, 9], [0, 0, 0, 0, 0, 0, 0], [0, 7, 0, 0, 0, 0, 0]]
    chain = {(0,), (0, 0), (0, 0, 0)}
    # after 1: two accepted and one more token -> after 4: none accepted -> after 5 -> end
    assert replay(ranks, 1, 7, chain) == Score(5, 3, (1, 1, 0), (3, 1, 1))
    # With the second-best token in the tree, the round after 4 accepts one.
    assert replay(ranks, 1, 7, chain | {(1,)}) == Score(5, 2, (2, 1, 0), (2, 2, 1))
    assert replay(ranks, 3, 4, chain) == Score(0, 0, (0, 0, 0), (0, 0, 0))


def test_scores_add_up() -> None:
    total = Score(10, 4, (3, 1), (4, 3)) + Score(2, 2, (0, 0), (2, 0)) + Score()
    assert total == Score(12, 6, (3, 1), (6, 3))
    assert total.tokens_per_round == 2.0
    assert total.alphas == (0.5, pytest.approx(1 / 3))


def test_answers_are_runs() -> None:
    marks = torch.tensor([0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    assert list(answers(marks)) == [(1, 3), (4, 7)]
    assert list(answers(torch.zeros(4, dtype=torch.bool))) == []


def test_best_tree_has_the_likeliest_paths() -> None:
    tree = best_tree([[0.6, 0.3, 0.0], [0.5, 0.1, 0.0]], 4)
    assert tree == {(0,), (1,), (0, 0), (1, 0)}  # 0.6, 0.3, 0.3, 0.15
    assert best_tree([[0.6, 0.3]], 32) == {(0,), (1,)}


def test_frequencies_cover_rounds_inside_answers() -> None:
    ranks = torch.tensor([[[0, 0, 1, 5, 0]]])
    answer = torch.tensor([[False, True, True, True, False]])
    assert rank_frequencies(ranks, answer)[0][:6] == [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_draft_equal_to_the_target_is_always_accepted(target: Target) -> None:
    """Predictions of the target itself: every token is accepted, at every depth and in every category."""

    class Oracle(DistilledDraft):
        def predict(self, target, states, depth):  # type: ignore[no-untyped-def]
            predictions = super().predict(target, states, depth)
            return type(predictions)(target.states(states.ids).last[None], (0,))

    ids = some_ids(2, 4)
    for _ in range(26):
        ids = torch.cat([ids, (target.states(ids).last[:, -1] @ target.head.T).argmax(-1)[:, None]], 1)
    answer = torch.zeros(2, 30, dtype=torch.bool)
    answer[:, 5:] = True
    oracle = Oracle(LayerShape.of(target.config), 1)
    padded, marks = (torch.nn.functional.pad(values, (0, 9)) for values in (ids.int(), answer))
    found = evaluate(oracle, target, DraftVocabulary(VOCAB), Text(padded, marks, ("a", "b")), depth=3)
    assert set(found.chain) == {"a", "b"}
    assert found.chain_overall == Score(48, 12, (12, 12, 12), (12, 12, 12))
    assert found.tree_overall.tokens_per_round == 4.0


@pytest.mark.parametrize("kind", ["eagle", "medusa", "distilled"])
def test_rows_without_an_answer_count_nothing(kind: str, target: Target) -> None:
    ids, answer = some_ids(2, 12), torch.zeros(2, 12, dtype=torch.bool)
    answer[1, 4:9] = True
    draft, vocabulary = drafts(target)[kind], DraftVocabulary(VOCAB, None)
    both = evaluate(draft, target, vocabulary, Text(ids, answer, ("none", "chat")), rows=1)
    alone = evaluate(draft, target, vocabulary, Text(ids[1:], answer[1:], ("chat",)), rows=1)
    assert both.chain == alone.chain


def test_a_draft_that_reads_tokens_alone_needs_no_pass_of_the_target(target: Target) -> None:
    class Forbidden(Exception):
        pass

    def refuse(*_: object) -> None:
        raise Forbidden

    handle = target.layers[0].register_forward_pre_hook(refuse)
    text = Text(some_ids(2, 12).int(), torch.ones(2, 12, dtype=torch.bool), ("a", "b"))
    try:
        distilled = DistilledDraft(LayerShape.of(target.config), 1)
        assert evaluate(distilled, target, DraftVocabulary(VOCAB), text, depth=2).chain_overall.rounds > 0
        with pytest.raises(Forbidden):
            evaluate(MedusaDraft(target.config.hidden_size, 2), target, DraftVocabulary(VOCAB), text, depth=2)
    finally:
        handle.remove()


def test_coupled_noise_is_gumbel_noise_that_chose_the_token() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 12, generator=draw).expand(40_000, -1)
    total = logits.logsumexp(-1, keepdim=True)
    tokens = logits.softmax(-1).multinomial(1, generator=draw)[:, 0]
    noise = coupled_noise(logits, total, tokens, draw)
    assert torch.equal((logits + noise).argmax(-1), tokens)
    # Over tokens drawn from the softmax, the noise of every token has the mean and the variance of Gumbel noise.
    torch.testing.assert_close(noise.mean(0), torch.full((12,), 0.5772), rtol=0, atol=0.03)
    torch.testing.assert_close(noise.var(0), torch.full((12,), torch.pi**2 / 6), rtol=0, atol=0.06)


def test_draft_equal_to_the_target_accepts_sampled_text(target: Target) -> None:
    """Coupled drafts of the target's own distribution are the target's tokens."""
    medusa = MedusaDraft(32, 1)
    ids = some_ids(2, 30)

    class Same(MedusaDraft):
        def predict(self, target: Target, states: States, depth: int) -> Predictions:
            return Predictions(states.last[None], (0,))

    draft = Same(32, 1)
    vocabulary = DraftVocabulary(VOCAB, torch.arange(0, VOCAB, 2))
    head = vocabulary.head(target.head)
    ranks = token_ranks(draft, target, head, vocabulary, ids, 1, temperature=1.0)[0, :, :-1]
    inside = vocabulary.contains(ids[:, 1:])
    assert (ranks[inside] == 0).all()
    assert (ranks[~inside] == NO_RANK).all()
    other = token_ranks(medusa, target, head, vocabulary, ids, 1, temperature=1.0)[0, :, 1:-1]
    assert (other[inside[:, 1:]] > 0).any()
