"""Text generation and training on a GPU."""

from pathlib import Path

import pytest
import torch

from paceline.core.clock import VirtualClock
from paceline.models.loading.load import open_checkpoint
from paceline.tools.progress.progress import PlainProgress
from paceline.tools.train.corpus import turn_tokens
from paceline.tools.train.evaluate import answers
from paceline.tools.train.generator import TextGenerator
from paceline.tools.train.plan import Kind, TrainPlan
from paceline.tools.train.run import train
from paceline.tools.train.target import Target
from tests.tools.train.test_generator import scripts
from tests.tools.train.tiny import save_tiny

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax:UserWarning"),  # Inductor, on how it compiles a loss
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_graphs_generate_the_targets_greedy_text(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny(tmp_path))
    turns = turn_tokens(checkpoint.read_tokenizer())
    target = Target(checkpoint, torch.device("cuda"), torch.float32)
    generator = TextGenerator(target, turns, 16, 200, 0)  # two widths of the cache
    for _ in range(2):  # the second batch replays the graphs that the first captured
        rows = scripts(turns, 16)
        generated = generator.generate(rows, torch.zeros(16))
        best = (target.states(generated.ids.cuda().long()).last @ target.head.T).argmax(-1).cpu()
        same = total = 0
        for row, script in enumerate(rows):
            assert all(w < 0 or w == f for w, f in zip(script.ids, generated.ids[row].tolist(), strict=False))
            for start, end in answers(generated.answer[row]):
                same += int((generated.ids[row, start:end] == best[row, start - 1 : end - 1]).sum())
                total += end - start
        assert total > 1000
        assert same > 0.99 * total


def test_sampled_rows_differ(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny(tmp_path))
    turns = turn_tokens(checkpoint.read_tokenizer())
    generator = TextGenerator(Target(checkpoint, torch.device("cuda"), torch.bfloat16), turns, 16, 64, 0)
    rows = scripts(turns, 2)[:1] * 16
    batches = [generator.generate(rows, torch.ones(16)).ids for _ in range(2)]
    assert not torch.equal(*batches)
    assert len({tuple(row) for row in batches[1].tolist()}) > 8


@pytest.mark.parametrize("kind", ["eagle", "medusa", "distilled"])
@pytest.mark.parametrize("compiled", [False, True])
def test_complete_training(kind: Kind, compiled: bool, tmp_path: Path) -> None:
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
    assert record.curve[-1]["tokens_per_round"] > 1.05
    assert record.held_out["all"].tree_tokens_per_round > record.held_out["all"].tokens_per_round
