"""Medusa heads on the target's last hidden state. Head k predicts the token k positions further on; there is no cache.

`read_medusa` reads the description of heads in Paceline's form, in that of FasterDecoding and in that of vLLM. Published heads
have an output matrix each and may have several layers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from paceline.core.errors import IncompatibleDraft, UnsupportedModel
from paceline.kernels.linear import linear
from paceline.model_files import Metadata
from paceline.models.decoder import DecoderModel
from paceline.models.draft_files import DraftForm, FileWeights, NamedWeights, check_shapes, name_weights
from paceline.models.families.spec import DecoderSpec
from paceline.models.heads.vocabulary import DraftVocabulary, draft_ids, prepare_draft
from paceline.models.weights import Weights

MAX_HEADS, MAX_LAYERS = 64, 16


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """What Medusa heads compute: h <- h + silu(W h + b) for each layer, then the product with an output matrix."""

    num_heads: int
    hidden_size: int
    num_layers: int = 1
    has_bias: bool = True
    has_own_outputs: bool = False
    """Whether every head has an output matrix. Otherwise all use that of the draft, or the target's."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of layers by name."""
        d, shapes = self.hidden_size, dict[str, tuple[int, ...]]()
        for name in (f"blocks.{h}.{layer}" for h in range(self.num_heads) for layer in range(self.num_layers)):
            shapes[f"{name}.weight"] = (d, d)
            if self.has_bias:
                shapes[f"{name}.bias"] = (d,)
        return shapes


class MedusaModel:
    """From the state of token i, head k predicts token i + 1 + k, k = 1..H."""

    def __init__(self, config: MedusaConfig, weights: Weights, target: DecoderModel) -> None:
        """`weights` have the names of `config.tensors()`."""
        self.config = config
        device, dtype = target.device, target.dtype
        output = "lm_heads.0.weight" if config.has_own_outputs else "lm_head.weight"
        self.vocabulary = DraftVocabulary.of(target, weights, config.hidden_size, output=output)
        heads, layers = range(config.num_heads), range(config.num_layers)
        self.weights = [
            [prepare_draft(weights.matrix(f"blocks.{h}.{i}.weight"), device, dtype) for i in layers] for h in heads
        ]
        self.biases = [
            [weights.vector(f"blocks.{h}.{i}.bias").to(device, dtype) if config.has_bias else None for i in layers]
            for h in heads
        ]
        self.outputs = [self.vocabulary.head] * config.num_heads
        if config.has_own_outputs:
            others = (weights.matrix(f"lm_heads.{h}.weight") for h in heads[1:])
            self.outputs = [self.vocabulary.head, *(prepare_draft(matrix, device, dtype) for matrix in others)]
        self.weight_bytes = (
            sum(weight.nbytes for of_head in self.weights for weight in of_head) + self.vocabulary.nbytes
        )
        self.weight_bytes += sum(output.nbytes for output in self.outputs[1:]) if config.has_own_outputs else 0

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    def logits(self, last_hidden: Tensor) -> Tensor:
        """[S, H, V'] float32 from the target's states after its final norm, [S, D], or wider if the target is inflated."""
        rows, h = len(last_hidden), last_hidden[:, : self.config.hidden_size].contiguous()
        states = [self._state(h, number) for number in range(self.num_heads)]
        if self.config.has_own_outputs:
            logits = [linear(state, output).float() for state, output in zip(states, self.outputs, strict=True)]
            return torch.stack(logits, 1)
        return self.vocabulary.logits(torch.cat(states)).unflatten(0, (self.num_heads, rows)).transpose(0, 1)

    def _state(self, h: Tensor, number: int) -> Tensor:
        for weight, bias in zip(self.weights[number], self.biases[number], strict=True):
            h = h + silu(linear(h, weight, bias))
        return h


def read_medusa(
    source: str, form: DraftForm, config: Mapping[str, Any], stored: FileWeights, target: DecoderSpec
) -> tuple[MedusaConfig, NamedWeights]:
    """The description of the heads `source` and their weights under the names of the loader. Published configurations may name
    another number of heads than the file has, so they are counted in the file."""
    fields = Metadata(f"config.json of {source}", config)
    weights = name_weights(source, stored, _RENAMES[form])
    names, width = weights.names(), target.hidden_size
    if form == "paceline":
        shape = MedusaConfig(fields.count("num_heads", MAX_HEADS), fields.count("hidden_size", 1 << 20))
    else:
        numbers = [(int(match[1]), int(match[2])) for match in map(_LAYER.fullmatch, names) if match]
        heads, layers = (1 + max((number[i] for number in numbers), default=-1) for i in (0, 1))
        if not 0 < heads <= MAX_HEADS or not 0 < layers <= MAX_LAYERS:
            raise UnsupportedModel(
                f"{source} has weights of {heads} Medusa heads of {layers} layers: expected 1 to {MAX_HEADS} heads of 1 to "
                f"{MAX_LAYERS} layers"
            )
        found = weights.shape("blocks.0.0.weight") if "blocks.0.0.weight" in names else ()
        if len(found) == 2 and found[0] == found[1] != width:
            raise IncompatibleDraft(
                f"{source} was trained for a target of hidden size {found[0]}, and this target has {width}: "
                "train a draft for it with `paceline train`"
            )
        shape = MedusaConfig(heads, width, layers, "blocks.0.0.bias" in names, "lm_heads.0.weight" in names)
    is_truncated = fields.raw("truncated_vocab_size") not in (None, fields.raw("vocab_size"))
    if is_truncated and "token_map" not in names:
        raise UnsupportedModel(f"{source} has no token_map, which says what tokens its output matrices are for")
    check_shapes(source, weights, shape.tensors() | _outputs(source, shape, weights, target))
    return shape, weights


_LAYER = re.compile(r"blocks\.(\d{1,4})\.(\d{1,4})\.weight")


def _outputs(
    source: str, shape: MedusaConfig, weights: NamedWeights, target: DecoderSpec
) -> dict[str, tuple[int, ...]]:
    """Shapes of the output matrices and of the vocabulary map that the file has."""
    ids, found = draft_ids(weights, target.vocab_size), dict[str, tuple[int, ...]]()
    for name in {"d2t", "token_map"} & weights.names():
        found[name] = weights.shape(name)
    if shape.has_own_outputs:
        rows = next(iter(weights.shape("lm_heads.0.weight")), 0)
        if rows > target.vocab_size or (ids is not None and rows != len(ids)):
            raise IncompatibleDraft(
                f"{source} has output matrices of {rows} tokens, and the target has {target.vocab_size}"
                f"{'' if ids is None else f', of which the map has {len(ids)}'}: train a draft for it with `paceline train`"
            )
        found |= dict.fromkeys((f"lm_heads.{h}.weight" for h in range(shape.num_heads)), (rows, shape.hidden_size))
    return found


def _from_paceline(name: str) -> str:
    """heads.1.weight is the layer of the first head."""
    found = re.fullmatch(r"heads\.(\d{1,4})\.(weight|bias)", name)
    return f"blocks.{int(found[1]) - 1}.0.{found[2]}" if found else name


def _from_fasterdecoding(name: str) -> str:
    """0.0.linear.weight is the first layer of the first head, 0.1.weight its output matrix if it has one layer."""
    name = re.sub(r"^medusa_heads?\.", "", name)
    layer = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.linear\.(weight|bias)", name)
    if layer:
        return f"blocks.{layer[1]}.{layer[2]}.{layer[3]}"
    output = re.fullmatch(r"(\d{1,4})\.\d{1,4}\.weight", name)
    return f"lm_heads.{output[1]}.weight" if output else name


def _from_vllm(name: str) -> str:
    name = name.removeprefix("medusa_heads.")
    return re.sub(r"^blocks\.(\d{1,4})\.layers\.(\d{1,4})\.", r"blocks.\1.\2.", name)


_RENAMES: Mapping[str, Callable[[str], str]] = {
    "paceline": _from_paceline,
    "medusa": _from_fasterdecoding,
    "medusa_vllm": _from_vllm,
}
