"""Train the drafts that ship with the project: the target writes text once, three drafts learn from it.

    python benchmarks/train_h200.py MODEL DATA WORK OUT

MODEL is the target (a .gguf file), DATA a folder with `gsm8k_train_questions.jsonl` (prompts to train on) and
`spec_bench_dev.jsonl` (to judge by, never trained on), WORK a folder for text and checkpoints, OUT one for what is kept:
a .tar for each draft and summary.md. Call it again with the same WORK after an interruption, or to go on after --deadline.
Needs torch, numpy, safetensors, tokenizers and jinja2; `python -m paceline.train card FOLDER` draws the plots elsewhere.
"""

import argparse
import tarfile
from pathlib import Path

from paceline.core.clock import WallClock
from paceline.train.card import RECORD, read_record, table
from paceline.train.plan import Kind, TrainPlan
from paceline.train.progress import PlainProgress
from paceline.train.run import train

KINDS: tuple[Kind, ...] = ("eagle", "distilled", "medusa")
FOLDERS = ("data", "work", "out")
FILES = ("config.json", "model.safetensors", "card.md", RECORD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=float, default=1.6, help="minutes of writing")
    parser.add_argument("--eagle", type=float, default=3.7, help="minutes of training; 0 leaves a draft out")
    parser.add_argument("--distilled", type=float, default=2.9)
    parser.add_argument("--medusa", type=float, default=0.5)
    parser.add_argument(
        "--deadline", type=float, default=560.0, help="stop after so many seconds, to go on in a next call"
    )
    parser.add_argument("--draft-vocab", type=int, default=16384, help="0: the whole vocabulary")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--writer-rows", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--start", type=Path, help="folder with drafts of an earlier run, by kind, to train on")
    parser.add_argument("--steps", type=int, help="instead of minutes: for a quick try")
    parser.add_argument("--no-compile", action="store_true")
    given = parser.parse_args()

    clock = WallClock()
    started, progress = clock.now(), PlainProgress(clock)
    given.out.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        folder = given.work / kind
        minutes: float = getattr(given, kind)
        if minutes and not (folder / RECORD).exists():
            plan = TrainPlan(
                kind=kind,
                out=folder,
                model=given.model,
                text=given.work / "text.pt",
                prompts=(given.data / "gsm8k_train_questions.jsonl",),
                prompt_share=0.15,
                evaluate=given.data / "spec_bench_dev.jsonl",
                minutes=None if given.steps else minutes,
                steps=given.steps,
                text_tokens=200_000_000,
                text_minutes=given.text,
                length=given.length,
                writer_rows=given.writer_rows,
                rows=given.rows,
                draft_vocab=given.draft_vocab or None,
                learning_rate=given.learning_rate,
                start=given.start / kind if given.start else None,
                compile=not given.no_compile,
            )
            if (
                train(plan, command_of(parser, given), clock, progress, lambda: clock.now() - started > given.deadline)
                is None
            ):
                progress.note(f"{kind} is not done: call again with the same folders")
                break
        if (folder / RECORD).exists():
            pack(folder, given.out / f"{kind}.tar")
    summary = "\n\n".join(section(given.work / kind) for kind in KINDS if (given.work / kind / RECORD).exists())
    (given.out / "summary.md").write_text(summary + "\n", "utf-8")
    print(summary)


def command_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> str:
    """As it was given, but for where this machine keeps its folders."""
    options = {n: v for n, v in vars(given).items() if v != parser.get_default(n) and n not in ("model", *FOLDERS)}
    said = [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in options.items()]
    return " ".join(["python benchmarks/train_h200.py", Path(given.model).name, *map(str.upper, FOLDERS), *said])


def pack(folder: Path, path: Path) -> None:
    """One file a draft, each under 16 MB."""
    with tarfile.open(path, "w") as tar:
        for name in FILES:
            tar.add(folder / name, f"{folder.name}/{name}")


def section(folder: Path) -> str:
    record = read_record(folder)
    size = (folder / "model.safetensors").stat().st_size / 1e6
    return (
        f"## {record.kind}: {size:.1f} MB, {record.tokens / 1e6:.1f} M tokens in {record.seconds:.0f} s on {record.device}\n\n"
        + table(record.judged or record.held_out, record.nodes)
    )


if __name__ == "__main__":
    main()
