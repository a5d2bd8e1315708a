"""The weights of a layer of routed experts, as the kernels read them.

The matrices of all experts are stacked: expert e has rows e * 2F to (e + 1) * 2F of `gate_up` and rows e * D to (e + 1) * D of
`down`.
"""

import ctypes
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.activation import NUMBERS, Activation
from paceline.kernels.formats.linear import LinearWeight
from paceline.kernels.formats.packing import TILE, PackedWeight

Scoring = Literal["softmax", "sigmoid"]
"""The score of an expert from its logit. With `sigmoid`, normalised weights are those of the chosen experts over their sum."""


class _Header(ctypes.Structure):
    """`experts_t` in cpu/experts.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("router", "gate_up", "down", "router_bias", "gate_up_bias", "down_bias")),
        *((name, c_void_p) for name in ("choice_bias", "shared_gate_up", "shared_down")),
        *((name, c_int64) for name in ("num_experts", "per_token", "is_normalized", "activation", "is_sigmoid")),
        *((name, c_int64) for name in ("num_groups", "kept_groups")),
        ("scale", c_float),
    )


@dataclass(frozen=True, slots=True)
class Routing:
    num_experts: int
    per_token: int
    """Experts that a row uses."""
    is_normalized: bool
    """Whether the weights of a row's experts add up to 1; otherwise those of all experts do."""
    scoring: Scoring = "softmax"
    scale: float = 1.0
    """Factor of the weights."""
    num_groups: int = 1
    """Experts are chosen from `kept_groups` of so many groups: those with the highest score, or sum of the two highest sums of
    score and bias if there is a bias."""
    kept_groups: int = 1


class Experts:
    """Read-only. `address` is the argument of native functions, valid while this object exists; None without native kernels."""

    def __init__(
        self,
        routing: Routing,
        activation: Activation,
        router: LinearWeight,  # [E, D]
        gate_up: LinearWeight,  # [E 2F, D]
        down: LinearWeight,  # [E D, F]
        router_bias: Tensor | None = None,  # [E]
        gate_up_bias: Tensor | None = None,  # [E 2F]
        down_bias: Tensor | None = None,  # [E D]
        choice_bias: Tensor | None = None,  # [E] float32: of the choice of experts, not of their weights
        shared: tuple[LinearWeight, LinearWeight] | None = None,  # gate_up [2S, D] and down [D, S] of all rows
    ) -> None:
        self.routing, self.activation = routing, activation
        self.router, self.gate_up, self.down = router, gate_up, down
        self.router_bias, self.gate_up_bias, self.down_bias = router_bias, gate_up_bias, down_bias
        self.choice_bias, self.shared = choice_bias, shared
        self.address: int | None = None
        matrices = (router, gate_up, down, *(shared or ()))
        packed = [weight.address for weight in matrices if isinstance(weight, PackedWeight)]
        is_tiled = all(weight.shape[0] % (TILE * routing.num_experts) == 0 for weight in (gate_up, down))
        is_mixed = isinstance(gate_up, PackedWeight) != isinstance(down, PackedWeight)
        if is_mixed or (isinstance(down, PackedWeight) and not is_tiled):
            raise UnsupportedModel(
                f"experts with matrices of {gate_up.shape} and {down.shape}, in formats that kernels cannot combine: "
                f"the width of an expert and its inputs must be multiples of {TILE}, in one format"
            )
        if len(packed) == len(matrices):
            biases = (router_bias, gate_up_bias, down_bias, choice_bias)
            pointers = [None if bias is None else bias.data_ptr() for bias in biases]
            rest = routing.num_experts, routing.per_token, routing.is_normalized, NUMBERS[activation]
            self._header = _Header(
                *packed[:3],
                *pointers,
                *(packed[3:] or (None, None)),
                *rest,
                routing.scoring == "sigmoid",
                routing.num_groups,
                routing.kept_groups,
                routing.scale,
            )
            self.address = ctypes.addressof(self._header)
