"""Loads trained drafts for a target from folders: an EAGLE head, a block drafter, Medusa heads or a distilled
model.

The form of a folder is Paceline's, in which a draft has no embedding or head of its own, or one of the published forms of heads
(`draft_files/forms.py`). `check_draft` reads all that decides whether a head can be used, and no weights: what it accepts,
`load_draft` loads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import IncompatibleDraft, UnsupportedModel
from paceline.core.machine import GIB
from paceline.kernels.cpu import native
from paceline.model_files import Metadata
from paceline.model_files.hub import PREFIX, find_model
from paceline.model_files.tokenizer import Tokenizer, vocabulary_checksum
from paceline.models.draft_files import (
    FORM_NAMES,
    DraftForm,
    DraftKind,
    FileWeights,
    NamedWeights,
    recognize_draft,
)
from paceline.models.families.spec import DecoderSpec
from paceline.models.heads import DistilledModel, MedusaConfig, MedusaModel, draft_ids, inner_width, read_medusa
from paceline.models.heads.block import BlockConfig, BlockModel, read_block
from paceline.models.heads.eagle import EagleConfig, EagleModel, read_eagle
from paceline.models.loading import LoadedModel, build_model, open_checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class DraftFolder:
    name: str
    form: DraftForm
    kind: DraftKind
    config: Mapping[str, Any]
    """Contents of config.json."""
    weights: FileWeights

    @property
    def is_published(self) -> bool:
        """Whether the form is not that of Paceline."""
        return self.form != "paceline"

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
        verifier = self.fields.section("speculators_config").section("verifier")
        named = verifier.optional_text("name_or_path") or self.fields.optional_text("base_model_name_or_path")
        return self.fields.section("target").text("name", named or "a target that it does not name")

    @property
    def fields(self) -> Metadata:
        return Metadata(f"config.json of {self.name}", self.config)

    def check_target(self, target: DecoderSpec, tokenizer: Tokenizer | None) -> None:
        """Raise `IncompatibleDraft` unless the draft was trained for a target of this shape and vocabulary. The shapes of a
        published head are checked by `describe_head`."""
        if self.is_published:
            return
        vocab = self.config.get("vocab_size")
        if not self.hidden_size:
            raise UnsupportedModel(
                f"config.json of {self.name} lacks hidden_size: add that of the target it was trained for"
            )
        for name, expected, found in (
            ("hidden size", target.hidden_size, self.hidden_size),
            ("vocabulary size", target.vocab_size, vocab),
        ):
            if expected != found:
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
    found = recognize_draft(folder)
    if found is None:
        return None
    return DraftFolder(folder.name, found.form, found.kind, found.config, found.open())


@dataclass(frozen=True, slots=True, eq=False)
class HeadDescription:
    """What a head is, from config.json, the names and shapes of its weights and its vocabulary map."""

    name: str
    form: DraftForm
    config: EagleConfig | MedusaConfig | BlockConfig
    weights: NamedWeights
    """Its weights under the names of its loader."""
    num_proposed: int
    """Tokens that it may propose."""

    def cost(self, bytes_per_value: int) -> str:
        """What the head needs in addition to the target, if a value of the target has so many bytes."""
        size = f"{self.weights.stored.file_bytes / GIB:.2f} GiB of files"
        if isinstance(self.config, MedusaConfig):
            return size
        states = len(self.config.state_layers) * self.config.state_size * bytes_per_value
        cache = self.config.kv_bytes_per_token(bytes_per_value)
        return f"{size}, {cache} bytes of cache a token, {states} bytes of hidden states a token until it reads them"

    @property
    def summary(self) -> str:
        """What the head is, in a line."""
        names, shape = self.weights.names(), self.config
        tables = [
            table for table, name in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")) if name in names
        ]
        owns = f"own {' and '.join(tables)}" if tables else "the target's embedding and head"
        if isinstance(shape, MedusaConfig):
            outputs = "an output matrix each" if shape.has_own_outputs else "the target's head"
            what = f"{shape.num_heads} heads of {shape.num_layers} layers, {outputs}"
        elif isinstance(shape, BlockConfig):
            states = ", ".join(map(str, shape.state_layers))
            head = "" if shape.markov == "none" else f", a Markov head ({shape.markov}, rank {shape.markov_rank})"
            what = (
                f"{shape.decoder.num_layers} layers, blocks of {shape.block_size} rows for {shape.num_drafted} tokens, states "
                f"{states} of the target, {owns}{head}"
            )
        else:
            layers = f"{shape.decoder.num_layers} layer{'s' if shape.decoder.num_layers > 1 else ''}"
            states = ", ".join(map(str, shape.state_layers))
            flags = [name for name in ("norm_before_residual", "norm_output") if getattr(shape, name)]
            flags += {"each": ["fc_norm"], "joined": ["norm_before_fc"]}.get(shape.state_norm, [])
            kind = "qwen3" if shape.decoder.heads.has_qk_norm else "llama"
            what = f"{layers} of the type {kind}, states {states} of the target, {owns}" + "".join(
                f", {f}" for f in flags
            )
        return f"{FORM_NAMES[self.form]}: {what}, proposes {self.num_proposed} tokens"


def check_draft(folder: DraftFolder, target: DecoderSpec, tokenizer: Tokenizer | None) -> HeadDescription | None:
    """The description of a draft for a target of this shape; None if it is distilled. Raises `UnsupportedModel` or
    `IncompatibleDraft` if it cannot be used."""
    folder.check_target(target, tokenizer)
    return None if folder.kind == "distilled" else describe_head(folder, target)


def describe_head(folder: DraftFolder, target: DecoderSpec) -> HeadDescription:
    """The description of a head for a target of this shape. Raises `UnsupportedModel` for a head that cannot be used, and
    `IncompatibleDraft` for that of another target. No weights are read."""
    source = folder.name, folder.form, folder.config, folder.weights, target
    config: EagleConfig | MedusaConfig | BlockConfig
    match folder.kind:
        case "medusa":
            config, weights = read_medusa(*source)
        case "block":
            config, weights = read_block(*source)
        case _:
            config, weights = read_eagle(*source)
    ids = draft_ids(weights, target.vocab_size)
    num_proposed = target.vocab_size if ids is None else len(ids)
    asked = folder.config.get("draft_vocab_size")
    if asked is not None and asked != num_proposed:
        raise UnsupportedModel(
            f"config.json of {folder.name} has draft_vocab_size={asked!r:.40}, and its weights are for {num_proposed} tokens"
            f"{': they have no d2t' if ids is None else ''}"
        )
    return HeadDescription(folder.name, folder.form, config, weights, num_proposed)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedHead:
    """A draft that reads the target's hidden states."""

    name: str
    model: EagleModel | MedusaModel | BlockModel

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
        head = check_draft(folder, replace(target.config, hidden_size=width), target.tokenizer)
        if head is not None:
            if isinstance(head.config, MedusaConfig):
                return LoadedHead(folder.name, MedusaModel(head.config, head.weights, target.model))
            if isinstance(head.config, BlockConfig):
                return LoadedHead(folder.name, BlockModel(head.config, head.weights, target.model))
            return LoadedHead(folder.name, EagleModel(head.config, head.weights, target.model))
        model = DistilledModel(folder.config, folder.weights, target.model)
    return LoadedModel(folder.name, model.config, model, target.tokenizer)
