"""The files of a trained draft: its card, and an EAGLE head for vLLM.

The card has training text, settings and scores, as card.md and training.json. `export_head` writes a head as a folder in the
format of `speculators`, which vLLM loads. The folder has its own rows of the target's output head; the embedding stays the
target's.
"""

import json
import platform
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import InvalidRequest, MissingDependency, UnsupportedModel
from paceline.core.version import VERSION
from paceline.kernels.formats.weights import Dense
from paceline.model_files.hub import find_model
from paceline.models.drafts import open_draft_folder
from paceline.models.families.spec import DecoderSpec
from paceline.models.loading import open_checkpoint
from paceline.models.weights import Checkpoint
from paceline.tools.inflate import hf_config
from paceline.tools.progress import TrainingLog
from paceline.tools.train.evaluate import Evaluation, Score
from paceline.tools.train.plan import TrainPlan
from paceline.tools.train.text_files import TextFile

if TYPE_CHECKING:
    from paceline.tools.train.trainer import Trainer


RECORD, CARD, PLOT = "training.json", "card.md", "alpha.png"


@dataclass(frozen=True, slots=True)
class Row:
    """One category of a table of scores."""

    tokens_per_round: float
    tree_tokens_per_round: float
    alphas: tuple[float, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Record:
    """The content of `training.json`."""

    kind: str
    target: Mapping[str, str]
    command: str
    versions: Mapping[str, str]
    device: str
    parameters: int
    draft_vocab: int
    coverage: float
    """Share of the text's tokens that are in the draft's vocabulary."""
    text_tokens: int
    text_kinds: Mapping[str, int]
    text_prompts: tuple[str, ...]
    steps: int
    tokens: int
    seconds: float
    nodes: int
    held_out: Mapping[str, Row]
    evaluated: Mapping[str, Row]
    evaluated_prompts: str | None
    curve: tuple[Mapping[str, Any], ...]
    scored_vocab: int | None = None
    """Size of the draft's vocabulary at training, for which the scores hold. None if it is `draft_vocab`."""


def make_record(
    trainer: "Trainer",
    plan: TrainPlan,
    text: TextFile,
    held_out: Evaluation,
    evaluated: Evaluation | None,
    command: str,
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
        evaluated={} if evaluated is None else _rows(evaluated),
        evaluated_prompts=None if plan.evaluate is None else plan.evaluate.name,
        curve=tuple(asdict(point) | {"alphas": list(point.alphas)} for point in trainer.curve),
    )


def write_card(folder: Path, record: Record, progress: TrainingLog) -> None:
    """Write training.json and card.md, and the plot if matplotlib is installed."""
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n", "utf-8")
    try:
        plot_curve(record.curve, f"{record.kind} for {record.target['name']}", folder / PLOT)
    except MissingDependency as error:
        progress.note(f"no plot: {error}")
    (folder / CARD).write_text(_card(record, (folder / PLOT).exists()), "utf-8")


def read_record(folder: Path) -> Record:
    try:
        content = json.loads((folder / RECORD).read_text("utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise InvalidRequest(f"{folder} has no readable {RECORD}: {error}", field="folder") from error
    for name in ("held_out", "evaluated"):
        content[name] = {kind: Row(**row | {"alphas": tuple(row["alphas"])}) for kind, row in content[name].items()}
    return Record(**content | {"text_prompts": tuple(content["text_prompts"]), "curve": tuple(content["curve"])})


def table(rows: Mapping[str, Row], nodes: int) -> str:
    depth = max(len(row.alphas) for row in rows.values())
    lines = [
        f"| category | tokens per round, chain of {depth} | tree of {nodes} | alpha by position | tokens |",
        "|---|---|---|---|---|",
    ]
    for kind, row in rows.items():
        alphas = " ".join(f"{alpha:.2f}" for alpha in row.alphas)
        lines.append(
            f"| {kind} | {row.tokens_per_round:.2f} | {row.tree_tokens_per_round:.2f} | {alphas} | {row.tokens:,} |"
        )
    return "\n".join(lines)


def _rows(evaluation: Evaluation) -> dict[str, Row]:
    rows = {kind: _row(score, evaluation.tree[kind]) for kind, score in evaluation.chain.items()}
    return rows | {"all": _row(evaluation.chain_overall, evaluation.tree_overall)}


def _row(chain: Score, tree: Score) -> Row:
    alphas = tuple(round(alpha, 4) for alpha in chain.alphas)
    return Row(round(chain.tokens_per_round, 4), round(tree.tokens_per_round, 4), alphas, chain.tokens)


def _card(record: Record, has_plot: bool) -> str:
    sources = ", ".join(record.text_prompts) or "none; the target generated every prompt"
    parts = [
        f"# {record.kind} draft for {record.target['name']}",
        f"{record.parameters / 1e6:.2f} M parameters in bfloat16; embedding and head are the target's. It drafts "
        f"{record.draft_vocab:,} tokens, {record.coverage:.2%} of the text.",
        f"Vocabulary of the target (sha256): `{record.target['vocabulary']}`",
        "## Training",
        f"    {record.command}",
        _list(
            {
                "text": f"{_count(record.text_tokens)} tokens generated by the target",
                "prompts from files": sources,
                "rows by kind": ", ".join(f"{kind} {count:,}" for kind, count in record.text_kinds.items()),
                "steps": f"{record.steps:,}, {_count(record.tokens)} tokens in {record.seconds:,.0f} s",
                "device": record.device,
                "versions": ", ".join(f"{name} {number}" for name, number in record.versions.items()),
            }
        ),
        "## Scores",
        "Greedy text of the target; a chain of drafts, and the best fixed tree (chosen on the same text). "
        "Alpha is the probability that a position is accepted, given that all before it were.",
    ]
    if record.scored_vocab is not None:
        parts.append(f"The scores are those of the vocabulary at training, of {record.scored_vocab:,} tokens.")
    if record.evaluated:
        parts += [f"On {record.evaluated_prompts}, never trained on:", table(record.evaluated, record.nodes)]
    parts += ["On held-out text of the training kinds:", table(record.held_out, record.nodes)]
    parts += ["## Scores during training", _curve(record.curve)]
    if has_plot:
        parts.append(f"![alpha against training tokens]({PLOT})")
    return "\n\n".join(parts) + "\n"


def _list(entries: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in entries.items())


def _curve(curve: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| training tokens | seconds | alpha 1 | tokens per round, chain | tree |", "|---|---|---|---|---|"]
    lines += [
        f"| {_count(p['tokens'])} | {p['seconds']:.0f} | {(p['alphas'] or [0])[0]:.3f} | {p['tokens_per_round']:.2f} | "
        f"{p['tree_tokens_per_round']:.2f} |"
        for p in curve
    ]
    return "\n".join(lines)


def _count(tokens: int) -> str:
    return f"{tokens:,}" if tokens < 1_000_000 else f"{tokens / 1e6:.1f} M"


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "paceline": VERSION}


def plot_curve(curve: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Plot alpha by position and tokens per round on held-out text against training tokens."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.ticker import EngFormatter, MaxNLocator
    except ImportError:
        raise MissingDependency("matplotlib", "plotting", "bench") from None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    tokens = [point["tokens"] for point in curve]
    num_positions = max((len(point["alphas"]) for point in curve), default=0)
    for position in range(num_positions):
        left.plot(
            tokens, [point["alphas"][position] for point in curve], marker="o", markersize=3, label=f"{position + 1}"
        )
    left.set_ylim(bottom=0.0)
    left.set_title("Alpha by position", fontsize=10, loc="left")
    if num_positions:
        left.legend(frameon=False, fontsize=8, ncols=5, title="position", title_fontsize=8)
    right.plot(tokens, [point["tokens_per_round"] for point in curve], marker="o", markersize=3, label="chain")
    right.plot(tokens, [point["tree_tokens_per_round"] for point in curve], marker="o", markersize=3, label="tree")
    right.set_ylim(bottom=1.0)
    right.set_title("Tokens per round", fontsize=10, loc="left")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("training tokens")
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


FORMAT = "0.3.0"
"""Version of the format, as the field `speculators_version`."""
WEIGHTS = "model.safetensors"


def export_head(draft: str | Path, target: str | Path, out: Path, speculative_tokens: int = 3) -> None:
    """Write the EAGLE head `draft` of `target` to the new folder `out`. Raises `UnsupportedModel` for other drafts.

    `speculative_tokens` is the default depth that the folder names. vLLM may be given another depth.
    """
    source = find_model(draft)
    folder = open_draft_folder(source) if source.is_dir() else None
    if folder is None or folder.kind != "eagle" or folder.is_published:
        raise UnsupportedModel(
            f"{draft} is not an EAGLE head of `paceline train`: only these have a layer in the format of speculators"
        )
    if out.exists():
        raise InvalidRequest(f"{out} exists: give another folder, or remove it", field="out")
    checkpoint = open_checkpoint(target)
    folder.check_target(checkpoint.config, checkpoint.read_tokenizer())
    tensors = load_file(source / WEIGHTS)
    tensors |= _vocabulary(checkpoint, tensors.get("d2t"))
    config = _config(folder.config, checkpoint.config, str(target), speculative_tokens)
    work = out.with_name(out.name + ".part")
    work.mkdir(parents=True)
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, work / WEIGHTS, {"format": "pt"})
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        shutil.copymode(work / "config.json", work / WEIGHTS)  # save_file makes it readable by its owner only
        work.rename(out)
    except BaseException:
        shutil.rmtree(work)
        raise


def _vocabulary(checkpoint: Checkpoint, offsets: Tensor | None) -> dict[str, Tensor]:
    """The head's rows of the target's output matrix, and the maps between the two vocabularies."""
    size = checkpoint.config.vocab_size
    ids = torch.arange(size) if offsets is None else torch.arange(len(offsets)) + offsets.to(torch.int64)
    name = "lm_head.weight" if "lm_head.weight" in checkpoint.weights.names() else "model.embed_tokens.weight"
    weight = checkpoint.weights.matrix(name)
    values = weight.values if isinstance(weight, Dense) else weight.dequantize()
    is_drafted = torch.zeros(size, dtype=torch.bool)
    is_drafted[ids] = True
    return {"lm_head.weight": values[ids].to(torch.bfloat16), "d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}


def _config(draft: Any, target: DecoderSpec, name: str, speculative_tokens: int) -> dict[str, Any]:
    layer = hf_config(target) | {
        "intermediate_size": draft["ffn_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": draft["num_heads"],
        "num_key_value_heads": draft["num_kv_heads"],
        "head_dim": draft["head_dim"],
        "rms_norm_eps": draft["rms_eps"],
        "rope_theta": draft["rope_theta"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    del layer["architectures"]
    method = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT,
        "draft_vocab_size": draft["draft_vocab_size"] or target.vocab_size,
        "norm_before_residual": False,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(draft["capture"]),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": name, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
