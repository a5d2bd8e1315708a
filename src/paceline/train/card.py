"""The card of a trained draft: what it learnt from, how, and how well it guesses. Also as training.json, for machines."""

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import InvalidRequest, MissingDependency
from paceline.train.data.text import TextFile
from paceline.train.evaluate import Evaluation, Score
from paceline.train.plan import TrainPlan
from paceline.train.plot import plot_curve
from paceline.train.progress import Progress

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer

RECORD, CARD, PLOT = "training.json", "card.md", "alpha.png"


@dataclass(frozen=True, slots=True)
class Row:
    """One category's line of a table."""

    tokens_a_round: float
    tree_tokens_a_round: float
    alphas: tuple[float, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Record:
    """Plain data: `training.json` is this and nothing else."""

    kind: str
    target: Mapping[str, str]
    command: str
    versions: Mapping[str, str]
    device: str
    parameters: int
    draft_vocab: int
    coverage: float
    """Share of the written text that the draft's vocabulary holds."""
    text_tokens: int
    text_kinds: Mapping[str, int]
    text_prompts: tuple[str, ...]
    steps: int
    tokens: int
    seconds: float
    nodes: int
    held_out: Mapping[str, Row]
    judged: Mapping[str, Row]
    judged_prompts: str | None
    curve: tuple[Mapping[str, Any], ...]


def record_of(
    trainer: "Trainer", plan: TrainPlan, text: TextFile, held_out: Evaluation, judged: Evaluation | None, command: str
) -> Record:
    target = trainer.target
    return Record(
        kind=plan.kind,
        target={"name": text.plan.target, "vocabulary": text.plan.vocabulary},
        command=command,
        versions=_versions(),
        device=torch.cuda.get_device_name() if target.device.type == "cuda" else platform.machine(),
        parameters=trainer.draft.num_parameters,
        draft_vocab=target.config.vocab_size if trainer.vocabulary.ids is None else len(trainer.vocabulary.ids),
        coverage=round(float(trainer.vocabulary.contains(text.train.ids.long()).float().mean()), 4),
        text_tokens=text.train.num_tokens,
        text_kinds=dict(Counter(text.train.kinds).most_common()),
        text_prompts=text.plan.prompts,
        steps=trainer.step,
        tokens=trainer.tokens,
        seconds=round(trainer.seconds, 1),
        nodes=held_out.nodes,
        held_out=_rows(held_out),
        judged={} if judged is None else _rows(judged),
        judged_prompts=None if plan.evaluate is None else plan.evaluate.name,
        curve=tuple(asdict(point) | {"alphas": list(point.alphas)} for point in trainer.curve),
    )


def write_card(folder: Path, record: Record, progress: Progress) -> None:
    """training.json and card.md, and the plot where matplotlib is."""
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n", "utf-8")
    try:
        plot_curve(record.curve, f"{record.kind} for {record.target['name']}", folder / PLOT)
    except MissingDependency as error:
        progress.note(f"no plot: {error}; then `python -m paceline.train card {folder}`")
    (folder / CARD).write_text(_card(record, (folder / PLOT).exists()), "utf-8")


def read_record(folder: Path) -> Record:
    try:
        content = json.loads((folder / RECORD).read_text("utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise InvalidRequest(f"{folder} has no readable {RECORD}: {error}", field="folder") from error
    for name in ("held_out", "judged"):
        content[name] = {kind: Row(**row | {"alphas": tuple(row["alphas"])}) for kind, row in content[name].items()}
    return Record(**content | {"text_prompts": tuple(content["text_prompts"]), "curve": tuple(content["curve"])})


def table(rows: Mapping[str, Row], nodes: int) -> str:
    depth = max(len(row.alphas) for row in rows.values())
    lines = [
        f"| category | tokens a round, chain of {depth} | tree of {nodes} | alpha by position | tokens |",
        "|---|---|---|---|---|",
    ]
    for kind, row in rows.items():
        alphas = " ".join(f"{alpha:.2f}" for alpha in row.alphas)
        lines.append(
            f"| {kind} | {row.tokens_a_round:.2f} | {row.tree_tokens_a_round:.2f} | {alphas} | {row.tokens:,} |"
        )
    return "\n".join(lines)


def _rows(evaluation: Evaluation) -> dict[str, Row]:
    rows = {kind: _row(score, evaluation.tree[kind]) for kind, score in evaluation.chain.items()}
    return rows | {"all": _row(evaluation.chain_overall, evaluation.tree_overall)}


def _row(chain: Score, tree: Score) -> Row:
    alphas = tuple(round(alpha, 4) for alpha in chain.alphas)
    return Row(round(chain.tokens_a_round, 4), round(tree.tokens_a_round, 4), alphas, chain.tokens)


def _card(record: Record, has_plot: bool) -> str:
    sources = ", ".join(record.text_prompts) or "none; every prompt is the target's own"
    parts = [
        f"# {record.kind} draft for {record.target['name']}",
        f"{record.parameters / 1e6:.2f} M parameters in bfloat16; embedding and head are the target's. It guesses "
        f"{record.draft_vocab:,} tokens, which make up {record.coverage:.2%} of the text.",
        f"Vocabulary of the target (sha256): `{record.target['vocabulary']}`",
        "## Training",
        f"    {record.command}",
        _list(
            {
                "text": f"{_count(record.text_tokens)} tokens written by the target itself",
                "prompts from files": sources,
                "rows by kind": ", ".join(f"{kind} {count:,}" for kind, count in record.text_kinds.items()),
                "steps": f"{record.steps:,}, {_count(record.tokens)} tokens in {record.seconds:,.0f} s",
                "device": record.device,
                "versions": ", ".join(f"{name} {number}" for name, number in record.versions.items()),
            }
        ),
        "## How well it guesses",
        "Greedy text of the target. A chain of drafts, and the best fixed tree (chosen on the same text). "
        "Alpha is the share accepted at a position, given that all before it were.",
    ]
    if record.judged:
        parts += [f"On {record.judged_prompts}, never trained on:", table(record.judged, record.nodes)]
    parts += ["On held-out text of the kinds it was trained on:", table(record.held_out, record.nodes)]
    parts += ["## What more training buys", _curve(record.curve)]
    if has_plot:
        parts.append(f"![alpha against training tokens]({PLOT})")
    return "\n\n".join(parts) + "\n"


def _list(entries: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in entries.items())


def _curve(curve: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| training tokens | seconds | alpha 1 | tokens a round, chain | tree |", "|---|---|---|---|---|"]
    lines += [
        f"| {_count(p['tokens'])} | {p['seconds']:.0f} | {(p['alphas'] or [0])[0]:.3f} | {p['tokens_a_round']:.2f} | "
        f"{p['tree_tokens_a_round']:.2f} |"
        for p in curve
    ]
    return "\n".join(lines)


def _count(tokens: int) -> str:
    return f"{tokens:,}" if tokens < 1_000_000 else f"{tokens / 1e6:.1f} M"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    with suppress(PackageNotFoundError):  # run from a checkout
        found["paceline"] = version("paceline")
    return found
