"""Writing and training on a GPU: what graphs write is what the target would, and every kind of draft learns."""

from pathlib import Path

import pytest
import torch

from paceline.core.clock import VirtualClock
from paceline.models.loading.load import open_checkpoint
from paceline.train.data.turns import turns_of
from paceline.train.data.writer import Writer
from paceline.train.drafts.target import Target
from paceline.train.evaluate import answers
from paceline.train.plan import Kind, TrainPlan
from paceline.train.progress import PlainProgress
from paceline.train.run import train
from tests.train.data.test_writer import scripts
from tests.train.tiny import save_tiny

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax:UserWarning"),  # Inductor, on how it compiles a loss
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_graphs_write_the_targets_own_greedy_text(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny(tmp_path))
    turns = turns_of(checkpoint.read_tokenizer())
    target = Target(checkpoint, torch.device("cuda"), torch.float32)
    writer = Writer(target, turns, 16, 200, 0)  # two widths of the cache
    for _ in range(2):  # the second batch replays what the first recorded
        asked = scripts(turns, 16)
        written = writer.write(asked, torch.zeros(16))
        best = (target.states(written.ids.cuda().long()).last @ target.head.T).argmax(-1).cpu()
        same = total = 0
        for row, script in enumerate(asked):
            assert all(w < 0 or w == f for w, f in zip(script.ids, written.ids[row].tolist(), strict=False))
            for start, end in answers(written.answer[row]):
                same += int((written.ids[row, start:end] == best[row, start - 1 : end - 1]).sum())
                total += end - start
        assert total > 1000
        assert same > 0.99 * total


def test_sampled_rows_differ(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny(tmp_path))
    turns = turns_of(checkpoint.read_tokenizer())
    writer = Writer(Target(checkpoint, torch.device("cuda"), torch.bfloat16), turns, 16, 64, 0)
    asked = scripts(turns, 2)[:1] * 16
    batches = [writer.write(asked, torch.ones(16)).ids for _ in range(2)]
    assert not torch.equal(*batches)
    assert len({tuple(row) for row in batches[1].tolist()}) > 8


@pytest.mark.parametrize("kind", ["eagle", "medusa", "distilled"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_whole_training(kind: Kind, compiled: bool, tmp_path: Path) -> None:
    clock = VirtualClock()
    plan = TrainPlan(
        kind=kind,
        out=tmp_path / "out",
        model=str(save_tiny(tmp_path / "tiny")),
        steps=120,
        learning_rate=1e-2,
        text_tokens=20_000,
        length=128,
        writer_rows=64,
        rows=8,
        draft_vocab=200,
        compile=compiled,
    )
    record = train(plan, "test", clock, PlainProgress(clock))
    assert record is not None
    assert record.curve[-1]["tokens_a_round"] > 1.05
    assert record.held_out["all"].tree_tokens_a_round > record.held_out["all"].tokens_a_round
