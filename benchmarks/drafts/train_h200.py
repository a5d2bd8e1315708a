"""Train one draft that ships with the project, within a given time, and compare it with the draft that it continues.

    python benchmarks/drafts/train_h200.py MODEL PROMPTS EVALUATE WORK OUT [--kind eagle] [--start FOLDER] [--seconds 470]

MODEL is the target (a .gguf file). PROMPTS is a folder of .jsonl files with training prompts. EVALUATE is
`spec_bench_dev.jsonl`: its prompts are never trained on. WORK holds text and checkpoints, and the same command resumes. OUT
receives the draft as a .tar and summary.md: scores of both drafts on all evaluation prompts, greedy and at temperature 1.
It needs torch, numpy, safetensors, tokenizers and jinja2; without matplotlib the card has no plot.
"""

import argparse
import gc
import tarfile
from pathlib import Path

import torch

from paceline.core.clock import Clock, WallClock
from paceline.models.loading.load import open_checkpoint
from paceline.tools.progress.progress import PlainProgress, StopRequest
from paceline.tools.train.card import RECORD, read_record
from paceline.tools.train.evaluate import Evaluation, evaluate
from paceline.tools.train.plan import TrainPlan
from paceline.tools.train.run import pick_device, train
from paceline.tools.train.saved_draft import load_draft
from paceline.tools.train.target import Target
from paceline.tools.train.text import TrainingText
from paceline.tools.train.text_files import Text

FOLDERS = ("prompts", "evaluate", "work", "out")
FILES = ("config.json", "model.safetensors", "card.md", RECORD)
DEPTH, NODES = 8, 31
TEMPERATURES = (0.0, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name in FOLDERS:
        parser.add_argument(name, type=Path)
    parser.add_argument("--kind", default="eagle", choices=("eagle", "distilled", "medusa"))
    parser.add_argument("--start", type=Path, help="folder of the draft to continue")
    parser.add_argument("--seconds", type=float, default=470.0, help="time of the whole script")
    parser.add_argument("--text-seconds", type=float, default=170.0, help="part of it for generating text")
    parser.add_argument("--compare-seconds", type=float, default=50.0, help="part of it for the comparison")
    parser.add_argument("--draft-vocab", type=int, default=32768, help="0: the whole vocabulary")
    parser.add_argument("--ffn-size", type=int, help="feed-forward size of the draft")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--writer-rows", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--prompt-share", type=float, default=0.8)
    parser.add_argument("--steps", type=int, help="training steps instead of seconds")
    parser.add_argument("--text-tokens", type=int, default=200_000_000)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()

    clock = WallClock()
    started, progress = clock.now(), PlainProgress(clock)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = TrainPlan(
        kind=options.kind,
        out=options.work / options.kind,
        model=options.model,
        text=options.work / "text.pt",
        prompts=tuple(sorted(options.prompts.glob("*.jsonl"))),
        prompt_share=options.prompt_share,
        evaluate=options.evaluate,
        minutes=None if options.steps else (options.seconds - options.compare_seconds) / 60,
        steps=options.steps,
        text_tokens=options.text_tokens,
        text_minutes=None if options.steps else options.text_seconds / 60,
        length=options.length,
        writer_rows=options.writer_rows,
        rows=options.rows,
        draft_vocab=options.draft_vocab or None,
        ffn_size=options.ffn_size,
        learning_rate=options.learning_rate,
        start=options.start,
        compile=not options.no_compile,
    )
    if not (plan.out / RECORD).exists():
        command = command_line(parser, options)
        if train(plan, command, clock, progress, _Deadline(clock, started + options.seconds)) is None:
            raise SystemExit("the training is not finished: run the same command again")
    pack(plan.out, options.out / f"{options.kind}.tar")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    drafts = {"new": plan.out} | ({"before": options.start} if options.start else {})
    summary = f"{heading(plan.out)}\n\n{compare(plan, drafts, clock)}\n"
    (options.out / "summary.md").write_text(summary, "utf-8")
    print(summary)
    print(f"{clock.now() - started:.0f} s")


class _Deadline(StopRequest):
    """Requests a stop at a time."""

    def __init__(self, clock: Clock, end: float) -> None:
        super().__init__()
        self._clock, self._end = clock, end

    def __call__(self) -> bool:
        return self._clock.now() > self._end


def command_line(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """The command line, with placeholders for local folders."""
    changed = {n: v for n, v in vars(options).items() if v != parser.get_default(n) and n not in ("model", *FOLDERS)}
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {getattr(value, 'name', value)}")
        for name, value in changed.items()
    ]
    return " ".join(
        ["python benchmarks/drafts/train_h200.py", Path(options.model).name, *map(str.upper, FOLDERS), *words]
    )


def pack(folder: Path, path: Path) -> None:
    """Pack a draft into one file."""
    with tarfile.open(path, "w") as tar:
        for name in FILES:
            tar.add(folder / name, f"{folder.name}/{name}")


def heading(folder: Path) -> str:
    record = read_record(folder)
    size = (folder / "model.safetensors").stat().st_size / 1e6
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in record.text_kinds.items())
    return (
        f"## {record.kind}: {size:.1f} MB, {record.tokens / 1e6:.1f} M tokens in {record.seconds:.0f} s on {record.device}\n\n"
        f"{record.text_tokens / 1e6:.1f} M tokens of text; draft vocabulary {record.draft_vocab:,}, {record.coverage:.2%} of "
        f"the text; rows by kind: {kinds}"
    )


def compare(plan: TrainPlan, drafts: dict[str, Path], clock: Clock) -> str:
    """Tables of tokens per round of drafts on the answers to the evaluation prompts."""
    checkpoint = open_checkpoint(plan.model)
    device = pick_device(plan.device)
    target = Target(checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    source = TrainingText(plan, target, checkpoint.read_tokenizer(), clock, PlainProgress(clock), StopRequest())
    found: dict[tuple[str, float], Evaluation] = {}
    for temperature in TEMPERATURES:
        text = source.evaluated(temperature)
        assert isinstance(text, Text)
        for name, folder in drafts.items():
            saved = load_draft(folder)
            found[name, temperature] = evaluate(
                saved.draft.to(device), target, saved.vocabulary, text, DEPTH, NODES, temperature=temperature
            )
    lines = [
        f"| draft | temperature | tokens per round, chain of {DEPTH} | tree of {NODES} | alpha by position |",
        "|---|---|---|---|---|",
    ]
    for (name, temperature), score in found.items():
        alphas = " ".join(f"{alpha:.3f}" for alpha in score.chain_overall.alphas)
        lines.append(
            f"| {name} | {temperature:g} | {score.chain_overall.tokens_per_round:.3f} | "
            f"{score.tree_overall.tokens_per_round:.3f} | {alphas} |"
        )
    columns = list(found)
    lines += [
        "",
        f"| category, tree of {NODES} | " + " | ".join(f"{name}, {t:g}" for name, t in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for kind in found[columns[0]].tree:
        cells = (score.tree[kind].tokens_per_round if kind in score.tree else 0.0 for score in found.values())
        lines.append(f"| {kind} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
