"""Recognises the form in which a folder stores a draft, by keys of config.json and names of tensors.

A form decides what the other keys of config.json mean: the same layer number is another hidden state in another form. A folder
in a form that is unknown, or that two readers would read differently, is refused with the key that decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from paceline.core.errors import UnsupportedModel
from paceline.model_files import Metadata, read_json
from paceline.models.draft_files.pickled import PickledWeights
from paceline.models.weights import FolderWeights, Weights

DraftKind = Literal["eagle", "medusa", "distilled", "block"]
DraftForm = Literal[
    "paceline", "speculators", "sglang", "deepspec", "eagle3", "eagle1", "medusa", "medusa_vllm",
    "dflash", "dspark", "speculators_dflash", "speculators_dspark",
]  # fmt: skip

FORM_NAMES: Mapping[DraftForm, str] = {
    "paceline": "Paceline",
    "speculators": "speculators EAGLE-3",
    "sglang": "SpecForge and SGLang EAGLE-3",
    "deepspec": "DeepSpec EAGLE-3",
    "eagle3": "SafeAILab EAGLE-3",
    "eagle1": "SafeAILab EAGLE and EAGLE-2",
    "medusa": "Medusa",
    "medusa_vllm": "Medusa in the form of vLLM",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "speculators_dflash": "speculators DFlash",
    "speculators_dspark": "speculators DSpark",
}
_SPECULATORS: Mapping[str, DraftForm] = {
    "eagle3": "speculators",
    "dflash": "speculators_dflash",
    "dspark": "speculators_dspark",
}
"""Forms by `speculators_model_type`."""
_ARCHITECTURES: Mapping[str, DraftForm] = {
    "LlamaForCausalLMEagle3": "sglang",
    "Qwen3Eagle3Model": "deepspec",
    "MedusaModel": "medusa_vllm",
    "DFlashDraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
}
_OTHER_DRAFTS = ("DFlash2DraftModel", "MLPSpeculatorPreTrainedModel")
"""Architectures of drafts that are not supported."""
_TRAINED: tuple[DraftKind, ...] = ("eagle", "medusa", "distilled")
"""Kinds that `paceline train` makes."""
_PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")


class FileWeights(Weights, Protocol):
    """The weights of a draft in its files."""

    @property
    def file_bytes(self) -> int: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def is_float(self, name: str) -> bool:
        """Whether the values are float32, float16 or bfloat16."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredDraft:
    """A draft in its files."""

    form: DraftForm
    kind: DraftKind
    config: Mapping[str, Any]
    """Contents of config.json."""
    folder: Path

    def open(self) -> FileWeights:
        return _open_weights(self.folder)


def recognize_draft(folder: Path) -> StoredDraft | None:
    """The draft in `folder`. None if it holds a whole model. Raises `UnsupportedModel` for a draft in another form."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    if config.get("paceline_draft") is not None:
        kind: Any = config["paceline_draft"]
        if kind not in _TRAINED:
            raise UnsupportedModel(f"{folder} has a draft of kind {kind!r:.80}; supported: {', '.join(_TRAINED)}")
        return StoredDraft("paceline", kind, config, folder)
    form = _published_form(folder, config)
    if form is None:
        return None
    return StoredDraft(form, _kind(form), config, folder)


def _kind(form: DraftForm) -> DraftKind:
    if form.startswith("medusa"):
        return "medusa"
    return "block" if form.endswith(("dflash", "dspark")) else "eagle"


def _published_form(folder: Path, config: Mapping[str, Any]) -> DraftForm | None:
    published = config.get("speculators_model_type")
    if published is not None:
        if not isinstance(published, str) or published not in _SPECULATORS:
            raise UnsupportedModel(
                f"{folder} has a speculator of type {published!r:.80}; supported: {', '.join(_SPECULATORS)}"
            )
        return _SPECULATORS[published]
    found = config.get("architectures")
    architectures = [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
    for name in architectures:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
        if name in _OTHER_DRAFTS:
            raise UnsupportedModel(
                f"{folder} has a draft of the architecture {name}, which is not supported; supported forms: "
                f"{', '.join(FORM_NAMES.values())}"
            )
    if "medusa_num_heads" in config:
        return "medusa"
    is_small_llama = architectures == ["LlamaForCausalLM"] and config.get("num_hidden_layers") == 1
    if not is_small_llama or not _has_weights(folder):
        return None
    names = {name.removeprefix("model.") for name in _open_weights(folder).names()}
    if "fc.weight" not in names:
        return None
    if "draft_vocab_size" in Metadata("config.json", config):
        return "eagle3"
    if any(name.startswith("midlayer.") for name in names):
        raise UnsupportedModel(
            f"{folder / 'config.json'} has no draft_vocab_size, and the weights are those of EAGLE-3: add the number of tokens "
            "that the head can propose"
        )
    return "eagle1"


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("model.safetensors", *_PICKLES))


def _open_weights(folder: Path) -> FileWeights:
    """The safetensors of the folder, or its pickle if there are none."""
    heads = "medusa_lm_head.safetensors"
    if not (folder / "model.safetensors").is_file() and (folder / heads).is_file():
        return FolderWeights(folder, heads)
    pickle = next((folder / name for name in _PICKLES if (folder / name).is_file()), None)
    if pickle is None or (folder / "model.safetensors").is_file():
        return FolderWeights(folder)
    return PickledWeights(pickle)
