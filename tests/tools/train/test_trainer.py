from pathlib import Path

import pytest
import torch

from paceline.core.clock import VirtualClock
from paceline.core.errors import InvalidConfig
from paceline.models.loading.load import open_checkpoint
from paceline.tools.train.drafts import DistilledDraft, Draft, EagleDraft, MedusaDraft
from paceline.tools.train.layers import DraftVocabulary, LayerShape
from paceline.tools.train.target import Target
from paceline.tools.train.text_files import Text
from paceline.tools.train.trainer import LearningRate, Trainer, TrainStatus
from tests.tools.train.tiny import VOCAB, StopWhen, some_ids


@pytest.fixture(scope="module")
def text(target: Target) -> Text:
    """Greedy text after random starts."""
    ids = some_ids(64, 4)
    for _ in range(28):
        ids = torch.cat([ids, (target.states(ids).last[:, -1] @ target.head.T).argmax(-1)[:, None]], 1)
    answer = torch.zeros(64, 32, dtype=torch.bool)
    answer[:, 4:] = True
    return Text(ids.int(), answer, ("x",) * 64)


def new_draft(kind: str, target: Target) -> Draft:
    torch.manual_seed(7)
    shape = LayerShape.of(target.config)
    return {
        "eagle": lambda: EagleDraft(shape, (1, 2, 3)),
        "medusa": lambda: MedusaDraft(32, 4),
        "distilled": lambda: DistilledDraft(shape, 2),
    }[kind]()


def make_trainer(
    kind: str, target: Target, text: Text, folder: Path, steps: int, rate: float = 1e-2, **changes: object
) -> Trainer:
    held_out = Text(text.ids[48:], text.answer[48:], text.kinds[48:])
    train = Text(text.ids[:48], text.answer[:48], text.kinds[:48])
    options = {"rows": 8, "seed": 1, "clock": VirtualClock(), "points": 1, "checkpoint": folder / "c.pt"} | changes
    schedule = LearningRate(rate, steps=steps, warmup=10)
    vocabulary = DraftVocabulary(VOCAB)
    return Trainer(new_draft(kind, target), target, vocabulary, train, held_out, schedule, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["eagle", "medusa", "distilled"])
def test_loss_falls_and_alpha_rises(kind: str, target: Target, text: Text, tmp_path: Path) -> None:
    trainer = make_trainer(kind, target, text, tmp_path, 60)
    reports: list[TrainStatus] = []
    trainer.run(reports.append)
    assert trainer.is_done
    assert reports[-1].loss < 0.8 * reports[0].loss
    assert trainer.curve[-1].alphas[0] > 0.15 > 30 / VOCAB  # far above chance
    assert trainer.curve[-1].tree_tokens_per_round > trainer.curve[-1].tokens_per_round > 1.1
    assert trainer.tokens == 60 * 8 * 32


@pytest.mark.parametrize("kind", ["eagle", "distilled"])
def test_resumed_training_ends_with_the_same_weights(kind: str, target: Target, text: Text, tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = make_trainer(kind, target, text, tmp_path / "whole", 12)
    whole.run(lambda status: None)
    first = make_trainer(kind, target, text, tmp_path / "parts", 12)
    first.run(lambda status: None, stop=StopWhen(lambda: first.step >= 5))
    assert first.step == 5
    assert not first.is_done
    second = make_trainer(kind, target, text, tmp_path / "parts", 12)
    second.run(lambda status: None)
    assert second.step == 12
    assert second.curve == whole.curve
    for name, weight in whole.draft.state_dict().items():
        assert torch.equal(weight, second.draft.state_dict()[name]), name


def test_checkpoint_of_another_training_is_rejected(target: Target, text: Text, tmp_path: Path) -> None:
    make_trainer("medusa", target, text, tmp_path, 2).run(lambda status: None)
    with pytest.raises(InvalidConfig, match="another training"):
        make_trainer("medusa", target, text, tmp_path, 2, rows=4).run(lambda status: None)
    with pytest.raises(InvalidConfig, match="another training"):
        make_trainer("eagle", target, text, tmp_path, 2).run(lambda status: None)


def test_every_epoch_has_every_row_once(target: Target, text: Text, tmp_path: Path) -> None:
    trainer = make_trainer("medusa", target, text, tmp_path, 2)
    epochs = [torch.cat([trainer.batch(step) for step in range(6 * e, 6 * e + 6)]) for e in (0, 1)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(48))
    assert not torch.equal(*epochs)


def test_schedule_of_seconds() -> None:
    schedule = LearningRate(1.0, seconds=100.0, warmup=10)
    assert schedule.done(10**6, 50.0) == 0.5
    assert schedule.done(0, 200.0) == 1.0
    assert schedule.rate(4, 0.0) == pytest.approx(0.5)
    assert schedule.rate(100, 50.0) == pytest.approx(0.5)
    assert schedule.rate(100, 100.0) == pytest.approx(0.0)
    assert LearningRate(steps=10, seconds=100.0).done(5, 20.0) == 0.5


def test_seconds_of_earlier_runs_count(target: Target, text: Text, tmp_path: Path) -> None:
    def run(seconds: float) -> Trainer:
        trainer = make_trainer("medusa", target, text, tmp_path, 2)
        clock = VirtualClock()
        trainer.schedule, trainer._clock = LearningRate(seconds=100.0), clock
        trainer.run(lambda status: None, stop=StopWhen(lambda: clock.now() >= seconds or bool(clock.advance(10.0))))
        return trainer

    assert run(60.0).seconds == 60.0
    second = run(60.0)
    assert second.is_done
    assert second.seconds == 100.0


@pytest.mark.parametrize(
    "kind", ["medusa", pytest.param("eagle", marks=pytest.mark.slow), pytest.param("distilled", marks=pytest.mark.slow)]
)
def test_bfloat16_target_trains_float32_weights(kind: str, tiny_folder: Path, text: Text, tmp_path: Path) -> None:
    half = Target(open_checkpoint(tiny_folder), torch.device("cpu"), torch.bfloat16)
    trainer = make_trainer(kind, half, text, tmp_path, 40)
    reports: list[TrainStatus] = []
    trainer.run(reports.append)
    losses = [status.loss for status in reports]
    assert sum(losses[30:36]) < 0.95 * sum(losses[:6])  # whole epochs: rows differ among themselves
    assert {parameter.dtype for parameter in trainer.draft.parameters()} == {torch.float32}
