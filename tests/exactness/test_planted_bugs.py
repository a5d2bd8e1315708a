"""Planted bugs: the exactness suite must fail on each of them."""

from dataclasses import replace

import pytest

from paceline.core.request import SamplingParams
from paceline.core.sequence import Origin
from paceline.engine import host
from paceline.speculation.drafts.drafts import depths
from paceline.speculation.verification import rejection
from paceline.speculation.verification import verification as coupled
from paceline.speculation.verification.verification import Verdict, verify
from tests.exactness.suite import check_distribution, check_identical, mixed_requests
from tests.exactness.test_rejection import PROMPT, SMALL, engine_for
from tests.fakes import TINY, Sampled, draft_model, tiny_engine, tiny_model

DRAWS = 6_000
"""Half of the draws of test_rejection.py: a bug that so few draws show is also found there."""
ALL_DRAWS = 12_000
"""As many as in test_rejection.py, for the bug that half of them do not show."""


@pytest.fixture(scope="module")
def models():
    return tiny_model(config=SMALL, scale=1.2), tiny_model(config=SMALL, perturb=0.5, scale=1.2)


def distribution_is_caught(models, proposer=Sampled, depth=3, draws=DRAWS, **sampling):
    with pytest.raises(AssertionError, match=r"not the target's|outside the truncated"):
        check_distribution(
            models[0],
            lambda: engine_for(*models, "dense", 1, proposer, depth),
            PROMPT,
            SamplingParams(**sampling),
            draws,
        )


def text_is_caught(*branches):
    """With chains and with trees, or with drafts of so many `branches`."""
    for count in branches or (1, 4):
        target = tiny_model()
        engine = tiny_engine(target, draft_model(tiny_model(perturb=0.2), branches=count), depth=3 if count == 1 else 9)
        with pytest.raises(AssertionError):
            check_identical(target, engine, mixed_requests(8, TINY.vocab_size))


@pytest.mark.slow  # test_rejection.py makes such checks with as many draws
def test_the_checks_pass_without_a_bug(models):
    """The same checks, the same number of draws, nothing planted."""
    check_distribution(
        models[0], lambda: engine_for(*models, "dense", 1), PROMPT, SamplingParams(temperature=0.7, top_k=3), ALL_DRAWS
    )


def test_logits_one_position_late(models, monkeypatch):
    def late(logits, rounds):
        shifted, start = logits.clone(), 0
        for round_ in rounds:
            end = start + len(round_.rows)
            shifted[start:end] = logits[start:end].roll(1, 0)
            start = end
        return verify(shifted, rounds)

    monkeypatch.setattr(host, "verify", late)
    text_is_caught()
    distribution_is_caught(models, temperature=1.0)


def test_bonus_after_a_rejected_last_token(models, monkeypatch):
    """The last of K was rejected and replaced, and a bonus is taken all the same: from logits of the rejected token."""

    def generous(logits, rounds):
        verdicts, start = [], 0
        for round_, verdict in zip(rounds, verify(logits, rounds), strict=True):
            end = start + len(round_.rows)
            if len(round_.draft) and len(verdict.path) == len(round_.draft) - 1:
                bonus = int(logits[end - 1].argmax())
                verdict = Verdict(
                    (*verdict.path, len(round_.draft) - 1), (*verdict.tokens, bonus), (*verdict.origins, Origin.BONUS)
                )
            verdicts.append(verdict)
            start = end
        return verdicts

    monkeypatch.setattr(host, "verify", generous)
    text_is_caught(1)
    distribution_is_caught(models, depth=1, temperature=1.0)


def test_q_from_before_truncation(models):
    class Untruncated(Sampled):
        """Draws from the truncated law and reports the one before truncation."""

        def distribution(self, logits, context):
            self.full = getattr(self, "full", {})
            q = super().distribution(logits, context)
            self.full[q] = (logits / context.params.temperature).softmax(0)
            return q

        def report(self, q):
            return self.full[q]

    distribution_is_caught(models, Untruncated, draws=ALL_DRAWS, temperature=1.0, top_k=2)


def test_temperature_on_one_side_only(models, monkeypatch):
    def untempered(logits, rows):
        return logits.log_softmax(1)

    monkeypatch.setattr(rejection, "log_distribution", untempered)
    distribution_is_caught(models, temperature=0.6)


def test_confidence_cut_off_on_sampled_tokens(models):
    class Cautious(Sampled):
        """Offers a drawn token only if the draft is sure of it: the choice has seen the draw."""

        def offers(self, q, token, possible):
            return possible and float(q[token]) > 0.3

    distribution_is_caught(models, Cautious, temperature=1.0)


def test_nodes_attend_to_other_paths(monkeypatch):
    span_of = host.span_of
    monkeypatch.setattr(host, "span_of", lambda *given: replace(span_of(*given), ancestors=None))
    text_is_caught(4)


def test_cache_of_the_accepted_path_is_not_moved(monkeypatch):
    monkeypatch.setattr(host, "path_moves", lambda *given: ([], []))
    text_is_caught(4)


def test_child_of_another_node_is_accepted(monkeypatch):
    """A walk by level alone: a node that follows the pick is accepted under any parent."""

    def careless(draft, picks):
        path = []
        for child, (token, level) in enumerate(zip(draft.tokens, depths(draft.parents), strict=True)):
            if level == len(path) + 1 and token == picks[path[-1] + 1 if path else 0]:
                path.append(child)
        return path, picks[path[-1] + 1 if path else 0]

    monkeypatch.setattr(coupled, "walk", careless)
    text_is_caught(4)
