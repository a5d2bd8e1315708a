"""A folder with a trained draft in it: EAGLE head, Medusa heads or distilled model, in our layout or, for EAGLE-3, in the
published `speculators` one.

A draft in our layout stores neither embedding nor head: it uses its target's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.core.errors import IncompatibleDraft, UnsupportedModel
from paceline.models.architectures.config import ModelConfig
from paceline.models.drafts.compatibility import fingerprint
from paceline.models.loading.checkpoint import Weights
from paceline.models.loading.safetensors_folder import FolderWeights
from paceline.models.tokenizer.tokenizer import Tokenizer

DraftKind = Literal["eagle", "medusa", "distilled"]


@dataclass(frozen=True, slots=True, eq=False)
class DraftFolder:
    name: str
    kind: DraftKind
    config: Mapping[str, Any]
    """config.json."""
    weights: Weights

    @property
    def is_published(self) -> bool:
        """In the `speculators` layout."""
        return "speculators_model_type" in self.config

    @property
    def hidden_size(self) -> int:
        """Of the target it was made for; 0 if it does not say."""
        layer = self.config.get("transformer_layer_config") or {}
        sizes = (self.config.get("target_hidden_size"), self.config.get("hidden_size"), layer.get("hidden_size"))
        return int(next((size for size in sizes if size), 0))

    @property
    def made_for(self) -> str:
        return str((self.config.get("target") or {}).get("name", "another target"))

    def check_target(self, target: ModelConfig, tokenizer: Tokenizer | None) -> None:
        """Raise `IncompatibleDraft` unless the draft was made for a target of this shape and vocabulary."""
        layer = self.config.get("transformer_layer_config") or {}
        vocab = self.config.get("vocab_size") or layer.get("vocab_size")
        if not self.hidden_size:
            raise UnsupportedModel(f"config.json of {self.name} does not say for which hidden size it was made")
        for what, ours, theirs in (
            ("hidden size", target.hidden_size, self.hidden_size),
            ("vocabulary size", target.vocab_size, vocab),
        ):
            # A published head may count its own, reduced vocabulary here
            if ours != theirs and not (self.is_published and what == "vocabulary size"):
                raise IncompatibleDraft(
                    f"{self.name} was made for a target of {what} {theirs}, and this one has {ours}: "
                    "train one for it with `paceline train`"
                )
        made_for = self.config.get("target") or {}
        checksum = made_for.get("vocabulary")
        if checksum is None or tokenizer is None:
            return
        own = fingerprint(tokenizer).vocabulary
        if checksum != own:
            raise IncompatibleDraft(
                f"{self.name} was made for {self.made_for}, whose vocabulary differs from this "
                f"target's (sha256 {checksum} and {own}): train one for it with `paceline train`"
            )


def open_draft_folder(folder: Path) -> DraftFolder | None:
    """The draft in `folder`; None if it holds an ordinary model."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text("utf-8"))
    kind = config.get("paceline_draft")
    published = config.get("speculators_model_type")
    if kind is None and published is None:
        return None
    if kind is None:
        if published != "eagle3":
            raise UnsupportedModel(f"{folder} holds a speculator of type {published!r}; supported: eagle3")
        kind = "eagle"
    if kind not in get_args(DraftKind):
        raise UnsupportedModel(f"{folder} holds a draft of kind {kind!r}; supported: {', '.join(get_args(DraftKind))}")
    return DraftFolder(folder.name, kind, config, FolderWeights(folder))
