"""Loading of a draft worker's model: a whole model, or a distilled draft with its target's embedding and head."""

from collections.abc import Sequence

import torch

from paceline.core.errors import IncompatibleDraft, InvalidConfig, UnsupportedModel
from paceline.engine.build import pick_dtype, pick_quantization
from paceline.models.drafts.folder import DraftFolder
from paceline.models.drafts.load import find_draft, load_draft, load_tables
from paceline.models.loading.load import LoadedModel
from paceline.runtime.deploy.worker_spec import WorkerSpec
from paceline.runtime.weights.manager import WeightManager


def load_draft_model(
    spec: WorkerSpec, device: torch.device, weights: WeightManager
) -> tuple[LoadedModel, LoadedModel | None]:
    """The draft, and the embedding and head that a distilled draft shares with its target. None for a whole model.

    A whole model may come from a peer. A distilled draft is small and always comes from disk.
    """
    config = spec.engine
    dtype = pick_dtype(config.dtype, device)
    folder = _draft_folder(config.model)
    if folder is None:
        loaded = weights.load(config.model, device, dtype, pick_quantization(config.quantization))
        weights.wait()
        return loaded, None
    if folder.kind != "distilled":
        raise IncompatibleDraft(
            f"{folder.name} ({folder.kind}) drafts from hidden states of the target: set it as `draft` of the target pool. "
            "A draft pool takes whole models and distilled drafts"
        )
    if config.quantization != "none":
        raise InvalidConfig(
            f"{folder.name} is a distilled draft and cannot be quantised: leave out `quantization` of its pool"
        )
    return _load_distilled(folder, spec.targets, device, dtype)


def _load_distilled(
    folder: DraftFolder, targets: Sequence[str], device: torch.device, dtype: torch.dtype
) -> tuple[LoadedModel, LoadedModel]:
    """The draft with the tables of the first target that it fits. Raises the `IncompatibleDraft` of the last target
    if none fits."""
    reason = IncompatibleDraft(f"{folder.name} needs a target pool")
    for name in targets:
        tables = load_tables(name, device, dtype)
        try:
            draft = load_draft(folder, tables)
        except IncompatibleDraft as error:
            reason = error
        else:
            assert isinstance(draft, LoadedModel)
            return draft, tables
    raise reason


def _draft_folder(name: str) -> DraftFolder | None:
    try:
        return find_draft(name)
    except UnsupportedModel:  # not on this machine; a peer may have it
        return None
