"""A folder with a trained draft: EAGLE head, Medusa heads or distilled model.

The layout is Paceline's, in which a draft has no embedding or head of its own, or for EAGLE-3 that of `speculators`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import IncompatibleDraft, UnsupportedModel
from paceline.model_files import Metadata
from paceline.model_files.tokenizer import Tokenizer, vocabulary_checksum
from paceline.models.families.spec import DecoderSpec
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
