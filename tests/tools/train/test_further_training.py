"""Further training of tiny drafts, and the gate on what it gives."""

import json
from pathlib import Path

import pytest

from paceline.gateway.sessions.samples import LearningSample
from paceline.tools.learn.learner import OfflineDecision, OfflineLimits, decide_offline
from paceline.tools.progress.progress import StopRequest
from paceline.tools.train.evaluate import Score
from paceline.tools.train.further import LearnedDraft
from paceline.tools.train.plan import Kind
from tests.tools.learn.tiny import garbage_samples, greedy_samples, make_training, save_tiny_draft
from tests.tools.train.tiny import save_tiny

LIMITS = OfflineLimits(margin=0.01, min_samples=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def traffic(model: Path) -> list[LearningSample]:
    return greedy_samples(model, 32)


def gate(candidate: LearnedDraft) -> OfflineDecision:
    rounds = ([score.rounds for score in scores] for scores in (candidate.before, candidate.after))
    return decide_offline(*rounds, LIMITS)


@pytest.mark.parametrize("kind", ["distilled", "eagle", "medusa"])
def test_every_kind_of_draft_learns_from_samples(
    kind: Kind, model: Path, traffic: list[LearningSample], tmp_path: Path
) -> None:
    parent = save_tiny_draft(tmp_path / "parent", model, kind)
    (tmp_path / "new").mkdir()
    candidate = make_training(model).run(parent, traffic[:24], traffic[24:], tmp_path / "new", StopRequest())
    assert candidate is not None
    decision = gate(candidate)
    assert decision.is_better, decision.reason
    before, after = (sum(scores, Score()).tokens_per_round for scores in (candidate.before, candidate.after))
    assert after > before
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert {"config.json", "model.safetensors", "card.md", "training.json"} <= names
    assert "checkpoint.pt" not in names
    card = (tmp_path / "new" / "card.md").read_text()
    assert "samples of live traffic" in card
    assert "| chat |" in card
    assert json.loads((tmp_path / "new" / "config.json").read_text())["paceline_draft"] == kind


def test_garbage_does_not_pass_the_offline_gate(model: Path, tmp_path: Path, traffic: list[LearningSample]) -> None:
    """All samples are random ids, the held-out ones too: no draft predicts them, so that no gain can be proven. With honest
    held-out samples the loss is measured."""
    (tmp_path / "trained").mkdir()
    training = make_training(model)
    parent = save_tiny_draft(tmp_path / "parent", model, "distilled")
    assert training.run(parent, traffic[:24], traffic[24:], tmp_path / "trained", StopRequest()) is not None
    for name, held_out in (("garbage", garbage_samples(16, seed=1)), ("honest", traffic[24:])):
        (tmp_path / name).mkdir()
        candidate = training.run(tmp_path / "trained", garbage_samples(24), held_out, tmp_path / name, StopRequest())
        assert candidate is not None
        decision = gate(candidate)
        assert not decision.is_better, f"{name}: {decision.reason}"


def test_a_stop_gives_no_candidate(model: Path, tmp_path: Path, traffic: list[LearningSample]) -> None:
    parent = save_tiny_draft(tmp_path / "parent", model, "medusa")
    stop = StopRequest()
    stop.request()
    assert make_training(model).run(parent, traffic[:8], traffic[8:16], tmp_path, stop) is None
    assert not (tmp_path / "model.safetensors").exists()


def test_scores_of_a_saved_draft(model: Path, tmp_path: Path, traffic: list[LearningSample]) -> None:
    parent = save_tiny_draft(tmp_path / "parent", model, "medusa")
    found = make_training(model).score(parent, traffic[:8])
    assert len(found.chain) == 8
    assert found.chain_overall.tokens_per_round >= 1.0
