"""The EAGLE head in training: one layer over fused target features, applied again to its own output.

Slot i joins the feature of token i with the embedding of token i+1 and predicts token i+2. At depth 0 all features are the
target's. At depth u slot i reads the head's output of slot i-1 at depth u-1. It attends to what an inference step finds
in its cache: slots up to i-u with the target's features, then one slot of each earlier depth, then itself.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from paceline.train.drafts.draft import Draft, Objective, Predictions, shape_from, shape_settings
from paceline.train.drafts.layers import FusionLayer, LayerShape, RMSNorm, causal, initialize
from paceline.train.drafts.target import States, Target


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
