"""Train the drafts that ship with the project: the target generates text once, and three drafts are trained on it.

    python benchmarks/train_h200.py MODEL DATA WORK OUT

MODEL is the target (a .gguf file). DATA is a folder with `gsm8k_train_questions.jsonl` (training prompts) and
`spec_bench_dev.jsonl` (evaluation prompts, never trained on). WORK holds text and checkpoints. OUT receives one .tar
per draft and summary.md. The same command resumes after an interruption or after --deadline. It needs torch, numpy,
safetensors, tokenizers and jinja2; without matplotlib the cards have no plot.
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
    parser.add_argument("--text", type=float, default=1.6, help="minutes of generating text")
    parser.add_argument("--eagle", type=float, default=3.7, help="minutes of training; 0 skips the draft")
    parser.add_argument("--distilled", type=float, default=2.9)
    parser.add_argument("--medusa", type=float, default=0.5)
    parser.add_argument(
        "--deadline", type=float, default=560.0, help="seconds until the script stops; the same command resumes"
    )
    parser.add_argument("--draft-vocab", type=int, default=16384, help="0: the whole vocabulary")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--writer-rows", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--start", type=Path, help="folder with drafts of an earlier run, by kind, to continue")
    parser.add_argument("--steps", type=int, help="training steps instead of minutes")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()

    clock = WallClock()
    started, progress = clock.now(), PlainProgress(clock)
    options.out.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        folder = options.work / kind
        minutes: float = getattr(options, kind)
        if minutes and not (folder / RECORD).exists():
            plan = TrainPlan(
                kind=kind,
                out=folder,
                model=options.model,
                text=options.work / "text.pt",
                prompts=(options.data / "gsm8k_train_questions.jsonl",),
                prompt_share=0.15,
                evaluate=options.data / "spec_bench_dev.jsonl",
                minutes=None if options.steps else minutes,
                steps=options.steps,
                text_tokens=200_000_000,
                text_minutes=options.text,
                length=options.length,
                writer_rows=options.writer_rows,
                rows=options.rows,
                draft_vocab=options.draft_vocab or None,
                learning_rate=options.learning_rate,
                start=options.start / kind if options.start else None,
                compile=not options.no_compile,
            )
            if (
                train(
                    plan,
                    command_line(parser, options),
                    clock,
                    progress,
                    lambda: clock.now() - started > options.deadline,
                )
                is None
            ):
                progress.note(f"{kind} is not finished: run the same command again")
                break
        if (folder / RECORD).exists():
            pack(folder, options.out / f"{kind}.tar")
    summary = "\n\n".join(section(options.work / kind) for kind in KINDS if (options.work / kind / RECORD).exists())
    (options.out / "summary.md").write_text(summary + "\n", "utf-8")
    print(summary)


def command_line(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """The command line, with placeholders for local folders."""
    changed = {n: v for n, v in vars(options).items() if v != parser.get_default(n) and n not in ("model", *FOLDERS)}
    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in changed.items()]
    return " ".join(["python benchmarks/train_h200.py", Path(options.model).name, *map(str.upper, FOLDERS), *words])


def pack(folder: Path, path: Path) -> None:
    """Pack a draft into one file."""
    with tarfile.open(path, "w") as tar:
        for name in FILES:
            tar.add(folder / name, f"{folder.name}/{name}")


def section(folder: Path) -> str:
    record = read_record(folder)
    size = (folder / "model.safetensors").stat().st_size / 1e6
    return (
        f"## {record.kind}: {size:.1f} MB, {record.tokens / 1e6:.1f} M tokens in {record.seconds:.0f} s on {record.device}\n\n"
        + table(record.evaluated or record.held_out, record.nodes)
    )


if __name__ == "__main__":
    main()
