"""The activations of feed-forward layers, as native kernels number them."""

from typing import Literal

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
NUMBERS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
"""Numbers of the kinds in cpu/activation.h."""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
