"""A whole training, from prompts to card."""

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
from paceline.train.__main__ import main
from paceline.train.card import read_record
from paceline.train.data.text import load_text
from paceline.train.plan import TrainPlan
from paceline.train.progress import PlainProgress
from paceline.train.run import CHECKPOINT, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts to train on and to judge by, and the text file that all tests share."""
    folder = tmp_path_factory.mktemp("run")
    lines = [{"question": f"what is {i}?"} for i in range(32)]
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    judged = [{"turns": [f"say {i}"], "category": "even" if i % 2 == 0 else "odd"} for i in range(6)]
    (folder / "judged.jsonl").write_text("\n".join(map(json.dumps, judged)))
    return folder


def plan_of(folder: Path, tiny_folder: Path, out: str, **changes: Any) -> TrainPlan:
    options: dict[str, Any] = {
        "kind": "medusa",
        "out": folder / out,
        "model": str(tiny_folder),
        "text": folder / "text.pt",
        "prompts": (folder / "own.jsonl",),
        "evaluate": folder / "judged.jsonl",
        "steps": 4,
        "text_tokens": 1000,
        "length": 64,
        "writer_rows": 8,
        "rows": 4,
        "device": "cpu",
    }
    return TrainPlan(**options | changes)


def run(plan: TrainPlan, **options: Any) -> Any:
    said = io.StringIO()
    clock = VirtualClock()
    record = train(plan, "the command", clock, PlainProgress(clock, said), **options)
    return record, said.getvalue()


def test_a_training_leaves_a_folder_and_a_card(folder: Path, tiny_folder: Path) -> None:
    record, said = run(plan_of(folder, tiny_folder, "medusa", draft_vocab=100))
    out = folder / "medusa"
    assert sorted(p.name for p in out.iterdir()) == [
        "alpha.png", "card.md", "config.json", "model.safetensors", "training.json"
    ]  # fmt: skip
    assert read_record(out) == record
    assert set(record.judged) == {"even", "odd", "all"}
    assert record.judged["all"].tokens == sum(row.tokens for kind, row in record.judged.items() if kind != "all")
    assert record.draft_vocab == 100
    assert 0.3 < record.coverage < 1
    assert record.steps == 4
    assert record.tokens == 4 * 4 * 64
    card = (out / "card.md").read_text()
    for word in ("the command", "own.jsonl", "judged.jsonl", "torch", "alpha.png", "| even |"):
        assert word in card
    assert "training medusa" in said
    config = json.loads((out / "config.json").read_text())
    assert config["draft_vocab_size"] == 100
    assert config["target"]["vocabulary"] == record.target["vocabulary"]


def test_text_is_written_once_and_holds_out_prompts(folder: Path, tiny_folder: Path) -> None:
    run(plan_of(folder, tiny_folder, "first"))
    before = (folder / "text.pt").stat().st_mtime_ns
    _, said = run(plan_of(folder, tiny_folder, "second"))
    assert (folder / "text.pt").stat().st_mtime_ns == before
    assert "writing" not in said
    text = load_text(folder / "text.pt")
    assert text.train.num_tokens >= 1000
    assert len(text.held_out) == 8
    rows, held = ({tuple(row) for row in part.ids.tolist()} for part in (text.train, text.held_out))
    assert not rows & held
    more = run(plan_of(folder, tiny_folder, "third", text_tokens=2000))[0]
    assert more.text_tokens >= 2000
    longer = load_text(folder / "text.pt")
    assert torch.equal(longer.train.ids[: len(text.train)], text.train.ids)
    assert torch.equal(longer.held_out.ids, text.held_out.ids)


def test_text_of_another_plan_is_refused(folder: Path, tiny_folder: Path) -> None:
    run(plan_of(folder, tiny_folder, "this"))
    with pytest.raises(InvalidConfig, match="name another file"):
        run(plan_of(folder, tiny_folder, "other", length=32))


def test_a_draft_is_not_judged_by_what_it_learns(folder: Path, tiny_folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="also given with --prompts"):
        run(plan_of(folder, tiny_folder, "cheat", evaluate=folder / "own.jsonl"))


def test_stopping_and_going_on_gives_the_same_draft(folder: Path, tiny_folder: Path) -> None:
    whole = plan_of(folder, tiny_folder, "whole", kind="distilled", steps=6)
    parts = plan_of(folder, tiny_folder, "parts", kind="distilled", steps=6)
    run(whole)
    countdown = iter(range(3))
    record, _ = run(parts, stop=lambda: next(countdown, None) is None)
    assert record is None
    assert (parts.out / CHECKPOINT).exists()
    assert "going on with the training that was interrupted" in run(parts)[1]
    assert not (parts.out / CHECKPOINT).exists()
    one, two = (load_file(plan.out / "model.safetensors") for plan in (whole, parts))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_interruption_while_text_is_written_changes_nothing(folder: Path, tiny_folder: Path) -> None:
    whole = plan_of(folder, tiny_folder, "one_go", text=None, evaluate=None)
    parts = plan_of(folder, tiny_folder, "two_goes", text=None, evaluate=None)
    run(whole)
    texts = load_text(whole.text_file)
    assert texts.batches == 2
    # 63 tokens of held-out text, as many of each batch: the second one is cut short
    countdown = iter(range(2 * 63 + 20))
    record, said = run(parts, stop=lambda: next(countdown, None) is None)
    assert record is None
    assert "training" not in said
    assert load_text(parts.text_file).batches == 1
    run(parts)
    assert torch.equal(load_text(parts.text_file).train.ids, texts.train.ids)


def test_a_trained_draft_is_not_overwritten(folder: Path, tiny_folder: Path) -> None:
    plan = plan_of(folder, tiny_folder, "done", evaluate=None, steps=1)
    run(plan)
    with pytest.raises(InvalidConfig, match="name another folder, or train it on"):
        run(plan)
    same = folder / "done" / ".." / "done"
    assert run(plan_of(folder, tiny_folder, "done", evaluate=None, steps=1, start=same))[0] is not None


def test_minutes_of_training_bound_those_of_writing(folder: Path, tiny_folder: Path) -> None:
    plan = plan_of(folder, tiny_folder, "slow", text=None, evaluate=None, steps=None, minutes=1.0, text_tokens=10**9)
    clock = VirtualClock()
    wishes: list[float] = []

    def tick() -> bool:
        clock.advance(0.5)
        wishes.append(clock.now())
        return len(wishes) > 4 * 63 + 8  # by then it learns

    said = io.StringIO()
    assert train(plan, "the command", clock, PlainProgress(clock, said), tick) is None
    text = load_text(plan.text_file)
    assert (text.batches, text.seconds) == (2, 63.0)
    assert "training medusa" in said.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"steps": None, "minutes": -1.0}, "--minutes must be above 0"),
        ({"steps": None}, "--minutes or --steps"),
        ({"learning_rate": 0.0}, "--learning-rate must be above 0"),
        ({"prompt_share": 2.0}, "0 to 1"),
        ({"prompts": (Path("nowhere.jsonl"),)}, "--prompts: there is no nowhere.jsonl"),
        ({"lora": Path(), "start": Path()}, "give one of them"),
    ],
)
def test_plans_that_make_no_sense_are_refused_before_anything_is_loaded(
    change: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        run(plan_of(folder, Path("no model"), "never", **change))
    assert not (folder / "never").exists()


def test_lora_and_training_on_start_from_the_saved_draft(folder: Path, tiny_folder: Path) -> None:
    run(plan_of(folder, tiny_folder, "base", kind="distilled", draft_vocab=120))
    base = load_file(folder / "base" / "model.safetensors")
    for name, change in (("adapted", {"lora": folder / "base"}), ("trained_on", {"start": folder / "base"})):
        run(plan_of(folder, tiny_folder, name, kind="distilled", steps=2, learning_rate=1.0, **change))
        found = load_file(folder / name / "model.safetensors")
        assert torch.equal(found["d2t"], base["d2t"])
        assert torch.equal(found["norm.weight"], base["norm.weight"]) == (name == "adapted")
        away = (found["layers.0.mlp.up_proj.weight"] - base["layers.0.mlp.up_proj.weight"]).float().norm()
        assert 0 < away < 0.5 * base["layers.0.mlp.up_proj.weight"].float().norm()
    with pytest.raises(IncompatibleDraft, match="asked for is 'eagle'"):
        run(plan_of(folder, tiny_folder, "wrong", kind="eagle", lora=folder / "base"))


def test_the_plain_command_line(folder: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", str(tiny_folder), "--text", str(folder / "cli.pt"), "--text-tokens", "500", "--length", "48"]
    common += ["--writer-rows", "4", "--rows", "2", "--steps", "2", "--prompts", str(folder / "own.jsonl")]
    assert main(["eagle", "--out", str(folder / "cli"), *common]) == 0
    printed = capsys.readouterr()
    assert "| all |" in printed.out
    assert "held out" in printed.err
    (folder / "cli" / "card.md").unlink()
    assert main(["card", str(folder / "cli")]) == 0
    assert "python -m paceline.train eagle" in (folder / "cli" / "card.md").read_text()
    assert main(["eagle", "--out", str(folder / "none"), *common[:-4]]) == 2
    assert "--minutes or --steps" in capsys.readouterr().err


BARE = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("typer", "rich", "matplotlib", "click"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
from paceline.train.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_it_runs_without_typer_rich_and_matplotlib(folder: Path, tiny_folder: Path) -> None:
    run(plan_of(folder, tiny_folder, "bare", evaluate=None))
    for name in ("alpha.png", "card.md"):
        (folder / "bare" / name).unlink()
    result = subprocess.run(
        [sys.executable, "-c", BARE, "card", str(folder / "bare")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "pip install 'paceline[bench]'" in result.stderr
    assert "alpha.png" not in (folder / "bare" / "card.md").read_text()
