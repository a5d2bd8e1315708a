"""Loads trained drafts for a target."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.kernels.cpu import native
from paceline.model_files.hub import PREFIX, find_model
from paceline.models.drafts.folder import DraftFolder, open_draft_folder
from paceline.models.heads import DistilledModel, MedusaModel, inner_width
from paceline.models.heads.eagle import EagleConfig, EagleModel
from paceline.models.loading import LoadedModel, build_model, open_checkpoint


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
