"""Loads trained drafts for a target from folders: an EAGLE head, Medusa heads or a distilled model.

The layout of a folder is Paceline's, in which a draft has no embedding or head of its own, or for EAGLE-3 that of
`speculators`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import IncompatibleDraft, UnsupportedModel
from paceline.kernels.cpu import native
from paceline.model_files import Metadata
from paceline.model_files.hub import PREFIX, find_model
from paceline.model_files.tokenizer import Tokenizer, vocabulary_checksum
from paceline.models.families.spec import DecoderSpec
from paceline.models.heads import DistilledModel, MedusaModel, inner_width
from paceline.models.heads.eagle import EagleConfig, EagleModel
from paceline.models.loading import LoadedModel, build_model, open_checkpoint
from paceline.models.weights import DraftKind, FolderWeights, Weights, read_draft_config


@dataclass(frozen=True, slots=True, eq=False)
class DraftFolder:
    name: str
    kind: DraftKind
    config: Mapping[str, Any]
    """Contents of config.json."""
    weights: Weights

    @property
    def is_published(self) -> bool:
        """Whether the layout is that of `speculators`."""
        return "speculators_model_type" in self.config

    @property
    def hidden_size(self) -> int:
        """Hidden size of the target that the draft was trained for; 0 if unknown."""
        fields = self.fields
        if fields.raw("target_hidden_size"):
            return fields.count("target_hidden_size", 1 << 20)
        if fields.raw("hidden_size"):
            return fields.count("hidden_size", 1 << 20)
        return fields.section("transformer_layer_config").count("hidden_size", 1 << 20, 0, least=0)

    @property
    def target_name(self) -> str:
        """Name of the target that the draft was trained for."""
        return self.fields.section("target").text("name", "another target")

    @property
    def fields(self) -> Metadata:
        return Metadata(f"config.json of {self.name}", self.config)

    def check_target(self, target: DecoderSpec, tokenizer: Tokenizer | None) -> None:
        """Raise `IncompatibleDraft` unless the draft was trained for a target of this shape and vocabulary."""
        vocab = self.config.get("vocab_size") or self.fields.section("transformer_layer_config").raw("vocab_size")
        if not self.hidden_size:
            raise UnsupportedModel(
                f"config.json of {self.name} lacks hidden_size: add that of the target it was trained for"
            )
        for name, expected, found in (
            ("hidden size", target.hidden_size, self.hidden_size),
            ("vocabulary size", target.vocab_size, vocab),
        ):
            # A published head may list its reduced vocabulary here
            if expected != found and not (self.is_published and name == "vocabulary size"):
                raise IncompatibleDraft(
                    f"{self.name} was trained for a target of {name} {found}, and this target has {expected}: "
                    "train a draft for it with `paceline train`"
                )
        checksum = self.fields.section("target").raw("vocabulary")
        if checksum is None or tokenizer is None:
            return
        target_checksum = vocabulary_checksum(tokenizer)
        if checksum != target_checksum:
            raise IncompatibleDraft(
                f"{self.name} was trained for {self.target_name}, whose vocabulary differs from this "
                f"target's (sha256 {checksum} and {target_checksum}): train a draft for it with `paceline train`"
            )


def open_draft_folder(folder: Path) -> DraftFolder | None:
    """The draft in `folder`; None if it holds a whole model."""
    found = read_draft_config(folder)
    if found is None:
        return None
    kind, config = found
    return DraftFolder(folder.name, kind, config, FolderWeights(folder))


@dataclass(frozen=True, slots=True, eq=False)
class LoadedHead:
    """A draft that reads the target's hidden states."""

    name: str
    model: EagleModel | MedusaModel

    def kv_bytes_per_token(self) -> int:
        if isinstance(self.model, MedusaModel):
            return 0
        return self.model.config.kv_bytes_per_token(self.model.dtype.itemsize)


def find_draft(name_or_path: str | Path) -> DraftFolder | None:
    """The trained draft with this name; None if the name is that of a whole model."""
    if str(name_or_path).startswith(PREFIX):
        return None
    path = find_model(name_or_path, "draft")
    return open_draft_folder(path) if path.is_dir() else None


def load_tables(name_or_path: str | Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A target without layers: the embedding and head that a distilled draft uses."""
    checkpoint = open_checkpoint(name_or_path, device, dtype)
    checkpoint = replace(checkpoint, config=checkpoint.config.first_layers(0))
    model = build_model(checkpoint, device, dtype)
    return LoadedModel(checkpoint.name, model.config, model, checkpoint.read_tokenizer())


def load_draft(folder: DraftFolder, target: LoadedModel) -> LoadedHead | LoadedModel:
    """A head; for a distilled draft, a model that uses its target's embedding and head."""
    with native.single_threaded_torch():
        width = inner_width(target.model, folder.hidden_size)
        folder.check_target(replace(target.config, hidden_size=width), target.tokenizer)
        if folder.kind == "eagle":
            shape = EagleConfig.read(folder.config, target.config)
            return LoadedHead(folder.name, EagleModel(shape, folder.weights, target.model))
        if folder.kind == "medusa":
            return LoadedHead(folder.name, MedusaModel(folder.config, folder.weights, target.model))
        model = DistilledModel(folder.config, folder.weights, target.model)
    return LoadedModel(folder.name, model.config, model, target.tokenizer)
