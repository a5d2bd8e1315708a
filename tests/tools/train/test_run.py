"""Complete trainings, from prompts to card."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.core.clock import VirtualClock
from paceline.core.errors import IncompatibleDraft, InvalidConfig
from paceline.tools.progress.progress import PlainProgress
from paceline.tools.train.card import read_record
from paceline.tools.train.plan import TrainPlan
from paceline.tools.train.run import CHECKPOINT, train
from paceline.tools.train.text_files import load_text
from tests.tools.train.tiny import StopWhen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training and evaluation prompts, and the text file that all tests share."""
    folder = tmp_path_factory.mktemp("run")
    lines = [{"question": f"what is {i}?"} for i in range(32)]
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    evaluated = [{"turns": [f"say {i}"], "category": "even" if i % 2 == 0 else "odd"} for i in range(6)]
    (folder / "evaluated.jsonl").write_text("\n".join(map(json.dumps, evaluated)))
    return folder


def make_plan(folder: Path, tiny_folder: Path, out: str, **changes: Any) -> TrainPlan:
    options: dict[str, Any] = {
        "kind": "medusa",
        "out": folder / out,
        "model": str(tiny_folder),
        "text": folder / "text.pt",
        "prompts": (folder / "own.jsonl",),
        "evaluate": folder / "evaluated.jsonl",
        "steps": 4,
        "text_tokens": 1000,
        "length": 64,
        "writer_rows": 8,
        "rows": 4,
        "device": "cpu",
    }
    return TrainPlan(**options | changes)


def run(plan: TrainPlan, **options: Any) -> Any:
    log = io.StringIO()
    clock = VirtualClock()
    record = train(plan, "the command", clock, PlainProgress(clock, log), **options)
    return record, log.getvalue()


def test_training_writes_a_folder_and_a_card(folder: Path, tiny_folder: Path) -> None:
    record, log = run(make_plan(folder, tiny_folder, "medusa", draft_vocab=100))
    out = folder / "medusa"
    assert sorted(p.name for p in out.iterdir()) == [
        "alpha.png", "card.md", "config.json", "model.safetensors", "training.json"
    ]  # fmt: skip
    assert read_record(out) == record
    assert set(record.evaluated) == {"even", "odd", "all"}
    assert record.evaluated["all"].tokens == sum(row.tokens for kind, row in record.evaluated.items() if kind != "all")
    assert record.draft_vocab == 100
    assert 0.3 < record.coverage < 1
    assert record.steps == 4
    assert record.tokens == 4 * 4 * 64
    card = (out / "card.md").read_text()
    for word in ("the command", "own.jsonl", "evaluated.jsonl", "torch", "alpha.png", "| even |"):
        assert word in card
    assert "training medusa" in log
    config = json.loads((out / "config.json").read_text())
    assert config["draft_vocab_size"] == 100
    assert config["target"]["vocabulary"] == record.target["vocabulary"]


def test_text_is_generated_once_and_holds_out_prompts(folder: Path, tiny_folder: Path) -> None:
    run(make_plan(folder, tiny_folder, "first"))
    before = (folder / "text.pt").stat().st_mtime_ns
    _, log = run(make_plan(folder, tiny_folder, "second"))
    assert (folder / "text.pt").stat().st_mtime_ns == before
    assert "generating text" not in log
    text = load_text(folder / "text.pt")
    assert text.train.num_tokens >= 1000
    assert len(text.held_out) == 8
    rows, held = ({tuple(row) for row in part.ids.tolist()} for part in (text.train, text.held_out))
    assert not rows & held
    more = run(make_plan(folder, tiny_folder, "third", text_tokens=2000))[0]
    assert more.text_tokens >= 2000
    longer = load_text(folder / "text.pt")
    assert torch.equal(longer.train.ids[: len(text.train)], text.train.ids)
    assert torch.equal(longer.held_out.ids, text.held_out.ids)


def test_text_of_another_plan_is_rejected(folder: Path, tiny_folder: Path) -> None:
    run(make_plan(folder, tiny_folder, "this"))
    with pytest.raises(InvalidConfig, match="give another file"):
        run(make_plan(folder, tiny_folder, "other", length=32))


def test_evaluation_prompts_must_not_be_training_prompts(folder: Path, tiny_folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="also in --prompts"):
        run(make_plan(folder, tiny_folder, "overlap", evaluate=folder / "own.jsonl"))


def test_resumed_training_gives_the_same_draft(folder: Path, tiny_folder: Path) -> None:
    whole = make_plan(folder, tiny_folder, "whole", kind="distilled", steps=6)
    parts = make_plan(folder, tiny_folder, "parts", kind="distilled", steps=6)
    run(whole)
    countdown = iter(range(3))
    record, _ = run(parts, stop=StopWhen(lambda: next(countdown, None) is None))
    assert record is None
    assert (parts.out / CHECKPOINT).exists()
    assert "resuming the interrupted training" in run(parts)[1]
    assert not (parts.out / CHECKPOINT).exists()
    one, two = (load_file(plan.out / "model.safetensors") for plan in (whole, parts))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_interruption_during_text_generation_changes_nothing(folder: Path, tiny_folder: Path) -> None:
    whole = make_plan(folder, tiny_folder, "whole_text", text=None, evaluate=None)
    parts = make_plan(folder, tiny_folder, "resumed_text", text=None, evaluate=None)
    run(whole)
    texts = load_text(whole.text_file)
    assert texts.batches == 2
    # 63 tokens of held-out text, as many of each batch: the second one is cut short
    countdown = iter(range(2 * 63 + 20))
    record, log = run(parts, stop=StopWhen(lambda: next(countdown, None) is None))
    assert record is None
    assert "training distilled" not in log
    assert "training medusa" not in log
    assert load_text(parts.text_file).batches == 1
    run(parts)
    assert torch.equal(load_text(parts.text_file).train.ids, texts.train.ids)


def test_trained_draft_is_not_overwritten(folder: Path, tiny_folder: Path) -> None:
    plan = make_plan(folder, tiny_folder, "done", evaluate=None, steps=1)
    run(plan)
    with pytest.raises(InvalidConfig, match="give another folder, or continue it"):
        run(plan)
    same = folder / "done" / ".." / "done"
    assert run(make_plan(folder, tiny_folder, "done", evaluate=None, steps=1, start=same))[0] is not None


def test_minutes_limit_the_whole_run(folder: Path, tiny_folder: Path) -> None:
    plan = make_plan(folder, tiny_folder, "slow", text=None, evaluate=None, steps=None, minutes=2.0, text_tokens=10**9)
    clock = VirtualClock()

    def tick() -> bool:
        clock.advance(0.5)
        return False

    log = io.StringIO()
    assert train(plan, "the command", clock, PlainProgress(clock, log), StopWhen(tick)) is not None
    text = load_text(plan.text_file)
    assert (text.batches, text.seconds) == (2, 63.0)
    assert "training medusa" in log.getvalue()
    assert 115.0 <= clock.now() <= 120.0


def test_a_cpu_says_what_to_expect_before_it_loads_the_model(folder: Path, tiny_folder: Path) -> None:
    first, *rest = run(make_plan(folder, tiny_folder, "expected", evaluate=None))[1].splitlines()
    assert "training on a CPU" in first
    assert any("first step" in line for line in rest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"steps": None, "minutes": -1.0}, "--minutes must be above 0"),
        ({"steps": None}, "--minutes or --steps"),
        ({"learning_rate": 0.0}, "--learning-rate must be above 0"),
        ({"prompt_share": 2.0}, "between 0 and 1"),
        ({"prompts": (Path("nowhere.jsonl"),)}, "--prompts: nowhere.jsonl does not exist"),
        ({"lora": Path(), "start": Path()}, "give one of them"),
    ],
)
def test_invalid_plans_are_rejected_before_loading(change: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(InvalidConfig, match=message):
        run(make_plan(folder, Path("no model"), "never", **change))
    assert not (folder / "never").exists()


def test_lora_and_start_continue_from_the_saved_draft(folder: Path, tiny_folder: Path) -> None:
    run(make_plan(folder, tiny_folder, "base", kind="distilled", draft_vocab=120))
    base = load_file(folder / "base" / "model.safetensors")
    for name, change in (("adapted", {"lora": folder / "base"}), ("continued", {"start": folder / "base"})):
        run(make_plan(folder, tiny_folder, name, kind="distilled", steps=2, learning_rate=1.0, **change))
        found = load_file(folder / name / "model.safetensors")
        assert torch.equal(found["d2t"], base["d2t"])
        assert torch.equal(found["norm.weight"], base["norm.weight"]) == (name == "adapted")
        distance = (found["layers.0.mlp.up_proj.weight"] - base["layers.0.mlp.up_proj.weight"]).float().norm()
        assert 0 < distance < 0.5 * base["layers.0.mlp.up_proj.weight"].float().norm()
    with pytest.raises(IncompatibleDraft, match="not 'eagle'"):
        run(make_plan(folder, tiny_folder, "wrong", kind="eagle", lora=folder / "base"))


def test_command_line_trains_and_prints_the_scores(folder: Path, tiny_folder: Path) -> None:
    from typer.testing import CliRunner

    from paceline.cli.commands import cli

    options = ["--model", str(tiny_folder), "--text", str(folder / "cli.pt"), "--text-tokens", "500", "--length", "48"]
    options += ["--writer-rows", "4", "--rows", "2", "--prompts", str(folder / "own.jsonl")]
    result = CliRunner().invoke(cli, ["train", "eagle", "--out", str(folder / "cli"), *options, "--steps", "2"])
    assert result.exit_code == 0, result.output
    assert "all" in result.stdout
    assert "held out" in result.stderr
    result = CliRunner().invoke(cli, ["train", "eagle", "--out", str(folder / "none"), *options])
    assert result.exit_code == 2
    assert "--minutes or --steps" in result.stderr


WITHOUT_EXTRAS = """
import sys
from pathlib import Path
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("typer", "rich", "matplotlib", "click"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
from paceline.core.clock import WallClock
from paceline.tools.train.card import read_record, write_card
from paceline.tools.progress.progress import PlainProgress
from paceline.tools.train.run import train
folder = Path(sys.argv[1])
write_card(folder, read_record(folder), PlainProgress(WallClock()))
"""


def test_training_imports_without_typer_rich_and_matplotlib(folder: Path, tiny_folder: Path) -> None:
    run(make_plan(folder, tiny_folder, "bare", evaluate=None))
    for name in ("alpha.png", "card.md"):
        (folder / "bare" / name).unlink()
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, str(folder / "bare")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "pip install 'paceline[bench]'" in result.stderr
    assert "alpha.png" not in (folder / "bare" / "card.md").read_text()


def test_continued_draft_can_grow_and_change_its_vocabulary(folder: Path, tiny_folder: Path) -> None:
    run(make_plan(folder, tiny_folder, "small", kind="eagle", evaluate=None, steps=1, draft_vocab=100))
    start = folder / "small"
    larger = {"kind": "eagle", "evaluate": None, "steps": 1, "start": start, "ffn_size": 64, "draft_vocab": 150}
    run(make_plan(folder, tiny_folder, "large", **larger))
    before, after = (load_file(folder / name / "model.safetensors") for name in ("small", "large"))
    assert len(before["d2t"]) == 100
    assert len(after["d2t"]) == 150
    assert after["layers.0.mlp.down_proj.weight"].shape == (32, 64)
    change = after["layers.0.mlp.down_proj.weight"][:, :48] - before["layers.0.mlp.down_proj.weight"]
    assert change.abs().max() < 0.1
    with pytest.raises(InvalidConfig, match="only grows"):
        run(make_plan(folder, tiny_folder, "narrow", **larger | {"ffn_size": 32}))
