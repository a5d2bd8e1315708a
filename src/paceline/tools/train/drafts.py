"""Drafts in training: their interface, low-rank adaptation, and the distilled, Medusa and EAGLE drafts.

In a round whose last committed token is at position p, a draft predicts the tokens at p+1, p+2, … `Predictions` holds the
hidden states from which the target's head computes each draft token. A draft token counts only if all before it were
accepted, so the target's own text is the context of every prediction.

A `DistilledDraft` is a small Llama that uses the target's embedding and head. In a `MedusaDraft`, head k predicts k tokens
ahead from the target's last hidden state. An `EagleDraft` is one layer over fused target features, applied again to its own
output. Slot i joins the feature of token i with the embedding of token i+1 and predicts token i+2. At depth 0 all features are
the target's. At depth u slot i reads the head's output of slot i-1 at depth u-1. It attends to what an inference step finds in
its cache: slots up to i-u with the target's features, then one slot of each earlier depth, then itself.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from paceline.models.families.layers import Heads
from paceline.tools.train.layers import FeedForward, FusionLayer, Layer, LayerShape, RMSNorm, causal, initialize
from paceline.tools.train.target import States, Target


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    hidden: Tensor
    """[U, B, S, D]: row j at depth u predicts token j+1 as the (u+1)-th token of its round. The target predicts the same token
    from its last hidden state of row j."""
    first: tuple[int, ...]
    """The first row with a prediction, for each depth. Rows before it are padding."""


@dataclass(frozen=True, slots=True)
class Objective:
    """loss = sum over depths u of decay^u KL(p || q)"""

    depth: int
    decay: float = 1.0


class Draft(nn.Module):
    """A draft in training. The names of `state_dict()` are those of the saved folder."""

    kind: ClassVar[str]
    objective: ClassVar[Objective]
    is_same_at_every_depth: ClassVar[bool] = False
    """Whether predictions depend on tokens only, and so not on the depth."""
    state_layers: tuple[int, ...] = ()
    """Layers of the target whose outputs the draft reads, counted from 1."""

    def states(self, target: Target, ids: Tensor) -> States:
        """What `predict` reads of `ids` [B, S]. If predictions depend on tokens only, the target computes nothing."""
        if self.is_same_at_every_depth:
            return States(ids, target.embedding.new_empty(*ids.shape, 0), None)
        return target.states(ids, self.state_layers)

    @abstractmethod
    def predict(self, target: Target, states: States, depth: int) -> Predictions: ...

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The draft's entries of config.json. `from_settings` rebuilds the draft from them."""

    @abstractmethod
    def calibrate(self, target: Target, states: States) -> None:
        """Set scales from the first batch, before the first step of a new draft."""

    def recalibrate(self, states: States) -> None:
        """Restore the scales that a saved draft has folded in, from the first batch. Predictions stay the same."""
        return

    def weights(self) -> dict[str, Tensor]:
        """The weights of the saved folder, with scales folded in."""
        return {name: value.detach() for name, value in self.state_dict().items()}

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def shape_settings(shape: LayerShape) -> dict[str, Any]:
    return {
        "num_heads": shape.heads.num,
        "num_kv_heads": shape.heads.num_kv,
        "head_dim": shape.heads.head_dim,
        "ffn_size": shape.ffn_size,
    }


def shape_from(settings: dict[str, Any]) -> LayerShape:
    heads = Heads(settings["num_heads"], settings["num_kv_heads"], settings["head_dim"])
    return LayerShape(settings["hidden_size"], heads, settings["ffn_size"], settings["rms_eps"])


def widen(draft: Draft, shape: LayerShape, ffn_size: int) -> LayerShape:
    """Enlarge every feed-forward block of a draft and return its new shape. Predictions stay the same."""
    for module in draft.modules():
        if isinstance(module, FeedForward):
            module.widen(ffn_size)
    return replace(shape, ffn_size=ffn_size)


class LowRank(nn.Module):
    """W + B A / sqrt(r). B starts at zero, so the weight is unchanged at first."""

    def __init__(self, outputs: int, inputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = rank**-0.5

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.up @ self.down)


def add_lora(draft: Draft, rank: int) -> None:
    """Freeze the draft and add a trainable low-rank term to every matrix."""
    draft.requires_grad_(False)
    for module in list(draft.modules()):
        if isinstance(module, nn.Linear):
            outputs, inputs = module.weight.shape
            addition = LowRank(outputs, inputs, min(rank, outputs, inputs))
            parametrize.register_parametrization(module, "weight", addition)


def merge_lora(draft: Draft) -> None:
    """Fold the low-rank terms into the matrices."""
    for module in list(draft.modules()):
        if isinstance(module, nn.Linear) and parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


class DistilledDraft(Draft):
    kind = "distilled"
    objective: ClassVar[Objective] = Objective(depth=1)
    is_same_at_every_depth = True

    def __init__(self, shape: LayerShape, num_layers: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_norm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_eps)
        initialize(self.layers, shape.hidden_size)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> "DistilledDraft":
        return cls(shape_from(settings), settings["num_layers"])

    def settings(self) -> dict[str, Any]:
        return shape_settings(self.shape) | {"num_layers": len(self.layers)}

    @torch.no_grad()
    def calibrate(self, target: Target, states: States) -> None:
        self.norm.weight.fill_(float(target.norm.weight.float().abs().mean()))

    def predict(self, target: Target, states: States, depth: int) -> Predictions:
        rotary = target.rotary.at(slice(states.ids.shape[1]))
        x = self.embed_norm(F.embedding(states.ids, target.embedding).float())
        for layer in self.layers:
            x = layer(x, rotary)
        return Predictions(self.norm(x)[None], (0,))


class MedusaDraft(Draft):
    kind = "medusa"
    objective: ClassVar[Objective] = Objective(depth=4, decay=0.8)

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.heads = nn.ModuleDict({str(k): nn.Linear(hidden_size, hidden_size) for k in range(1, num_heads + 1)})
        for parameter in self.heads.parameters():
            nn.init.zeros_(parameter)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> "MedusaDraft":
        return cls(settings["hidden_size"], settings["num_heads"])

    def settings(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads}

    def calibrate(self, target: Target, states: States) -> None:
        """Does nothing, because a new head returns the target's own state."""

    def predict(self, target: Target, states: States, depth: int) -> Predictions:
        depth = min(depth, self.num_heads)
        h = states.last.float()  # [B, S, D]
        hidden = []
        for k in range(1, depth + 1):
            ahead = h[:, :-k] + F.silu(self.heads[str(k)](h[:, :-k])).float()
            hidden.append(F.pad(ahead, (0, 0, k, 0)))  # from row i head k predicts the state of row i+k
        return Predictions(torch.stack(hidden), tuple(range(1, depth + 1)))


class EagleDraft(Draft):
    kind = "eagle"
    feature_scale: Tensor  # [C * D]
    objective: ClassVar[Objective] = Objective(depth=3, decay=0.8)

    def __init__(self, shape: LayerShape, state_layers: tuple[int, ...]) -> None:
        super().__init__()
        size = shape.hidden_size
        self.shape, self.state_layers = shape, state_layers
        self.fc = nn.Linear(len(state_layers) * size, size, bias=False)
        self.layers = nn.ModuleList([FusionLayer(shape)])
        self.norm = RMSNorm(size, shape.rms_eps)
        self.register_buffer("feature_scale", torch.ones(len(state_layers) * size))
        nn.init.normal_(self.fc.weight, 0.0, (len(state_layers) * size) ** -0.5)
        initialize(self.layers, size)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> "EagleDraft":
        return cls(shape_from(settings), tuple(settings["capture"]))

    def settings(self) -> dict[str, Any]:
        return shape_settings(self.shape) | {"capture": list(self.state_layers)}

    @torch.no_grad()
    def calibrate(self, target: Target, states: States) -> None:
        """Scale every captured channel to a mean magnitude of one, because magnitudes differ by factors of hundreds.

        The first token of a row is excluded; its activations are larger still.
        """
        self.feature_scale.copy_(_scale(states))
        self.norm.weight.fill_(float(target.norm.weight.float().abs().mean()))

    @torch.no_grad()
    def recalibrate(self, states: States) -> None:
        scale = _scale(states)
        is_adapted = parametrize.is_parametrized(self.fc, "weight")
        weight = self.fc.parametrizations.weight.original if is_adapted else self.fc.weight  # type: ignore[union-attr]
        weight.mul_(self.feature_scale / scale)  # type: ignore[operator]
        self.feature_scale.copy_(scale)

    def predict(self, target: Target, states: States, depth: int) -> Predictions:
        assert states.inner is not None
        features = self.fc(states.inner[:, :-1] * self.feature_scale).float()  # [B, S-1, D]
        embedding = F.embedding(states.ids[:, 1:], target.embedding).float()
        rotary = target.rotary.at(slice(features.shape[1]))
        attend = _Unrolled()
        hidden, fed = [], features
        for _ in range(depth):
            out = self.layers[0](fed, embedding, rotary, attend)
            hidden.append(F.pad(self.norm(out), (0, 0, 1, 0)))  # slot i is row i+1
            fed = torch.cat([features[:, :1], out[:, :-1]], 1)
        return Predictions(torch.stack(hidden), tuple(range(1, depth + 1)))

    def weights(self) -> dict[str, Tensor]:
        weights = super().weights()
        weights["fc.weight"] = weights["fc.weight"] * weights.pop("feature_scale")
        return weights


def _scale(states: States) -> Tensor:
    """[C * D]: the inverse mean magnitude of every captured channel."""
    assert states.inner is not None
    return 1 / states.inner[:, 1:].float().abs().mean((0, 1)).clamp(min=1e-6)


class _Unrolled:
    """Attention over all depths so far. Every call is one depth deeper."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        self._keys.append(k.repeat_interleave(groups, 1))
        self._values.append(v.repeat_interleave(groups, 1))
        if len(self._keys) == 1:
            return causal(q, self._keys[0], self._values[0])
        mask = unrolled_mask(q.shape[2], len(self._keys) - 1, q.device)
        keys, values = torch.cat(self._keys, 2), torch.cat(self._values, 2)  # [B, H, (u+1) S, hd]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def unrolled_mask(slots: int, depth: int, device: torch.device) -> Tensor:
    """[S, (depth+1) S] bool: slot i attends to slots up to i-depth of depth 0, and to slot i-depth+d of depth d > 0."""
    row, column = torch.arange(slots, device=device)[:, None], torch.arange(slots, device=device)
    parts = [column <= row - depth, *(column == row - depth + d for d in range(1, depth + 1))]
    return torch.cat(parts, 1)


def default_capture(num_layers: int) -> tuple[int, int, int]:
    """One early, one middle and one late layer, as in EAGLE-3. They are evenly spaced in a shallow target."""
    if num_layers > 8:
        return 2, num_layers // 2, num_layers - 3
    return num_layers // 3, 2 * num_layers // 3, num_layers
