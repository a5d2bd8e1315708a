"""A trained draft as a folder: config.json and model.safetensors in bfloat16. It is written whole or not at all."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import UnsupportedModel
from paceline.tools.train.drafts import DistilledDraft, Draft, EagleDraft, MedusaDraft
from paceline.tools.train.layers import DraftVocabulary
from paceline.tools.train.target import Target

CLASSES = {cls.kind: cls for cls in (EagleDraft, MedusaDraft, DistilledDraft)}

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class SavedDraft:
    draft: Draft
    vocabulary: DraftVocabulary
    config: dict[str, Any]


def save_draft(
    folder: Path, draft: Draft, vocabulary: DraftVocabulary, target: Target, identity: dict[str, str]
) -> None:
    """Write the folder. It has no embedding and head: they are the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    c = target.config
    config = {
        "paceline_draft": draft.kind,
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": None if vocabulary.ids is None else len(vocabulary.ids),
        "rms_eps": c.rms_eps,
        "rope_theta": c.rotary[0].theta,
        "max_position": c.max_position,
        "target": identity,
        **draft.settings(),
    }
    weights = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in draft.weights().items()}
    part = folder / f"{WEIGHTS}.part"
    save_file(weights | vocabulary.tensors(), part)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    shutil.copymode(folder / "config.json", part)  # save_file makes it readable by its owner only
    os.replace(part, folder / WEIGHTS)


def load_draft(folder: Path) -> SavedDraft:
    """A saved draft in float32, for further training."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, json.JSONDecodeError) as error:
        raise UnsupportedModel(f"{folder} is not the folder of a trained draft: {error}") from error
    kind = config.get("paceline_draft")
    if kind not in CLASSES:
        raise UnsupportedModel(f"{folder} holds a draft of unknown kind {kind!r}; known kinds: {', '.join(CLASSES)}")
    vocabulary = DraftVocabulary.from_tensors(config["vocab_size"], tensors)
    draft = CLASSES[kind].from_settings(config)
    own = {name: value.float() for name, value in tensors.items() if name not in ("d2t", "t2d")}
    draft.load_state_dict({**_unsaved(draft), **own})
    return SavedDraft(draft, vocabulary, config)


def _unsaved(draft: Draft) -> dict[str, Any]:
    """Training buffers that are folded into the saved weights, at neutral values."""
    return {name: value for name, value in draft.state_dict().items() if name not in draft.weights()}
