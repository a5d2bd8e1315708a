"""Names of inflated models; see `models/loading/inflated.py`. The module imports without torch."""

from dataclasses import dataclass
from urllib.parse import parse_qsl

from paceline.core.errors import UnsupportedModel
from paceline.model_files.hub.hub import EMBEDDED

PREFIX = "inflate:"
"""Prefix of names such as `inflate:llama-8b?base=smollm2&noise=0.06&seed=0`. These models are generated."""


@dataclass(frozen=True, slots=True)
class InflatedShape:
    hidden_size: int
    num_layers: int
    """Least number of layers; a small model with more keeps all of its layers."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int


SHAPES = {
    "llama-1b": InflatedShape(2048, 16, 32, 8, 64, 8192),
    "llama-8b": InflatedShape(4096, 32, 32, 8, 128, 14336),
    "llama-70b": InflatedShape(8192, 80, 64, 8, 128, 28672),
}


@dataclass(frozen=True, slots=True)
class Inflation:
    """Parameters of an inflated model. `noise`, in standard deviations of each matrix, changes the layers of the small model
    and lowers the acceptance of its drafts. Noise depends on `seed` only; other random weights depend on the device too."""

    shape: str
    base: str = EMBEDDED
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UnsupportedModel(f"unknown shape {self.shape!r}; choose from: {', '.join(SHAPES)}")
        if self.noise < 0:
            raise UnsupportedModel(f"noise must be 0 or more standard deviations, got {self.noise}")

    @classmethod
    def parse(cls, name: str) -> "Inflation":
        """Parses `inflate:SHAPE?base=…&noise=…&seed=…`. The parameters are optional."""
        shape, _, query = name.removeprefix(PREFIX).partition("?")
        kinds = {"base": str, "noise": float, "seed": int}
        given = dict(parse_qsl(query, keep_blank_values=True))
        unknown = sorted(given.keys() - kinds.keys())
        if unknown:
            raise UnsupportedModel(f"{name}: unknown parameter {unknown[0]!r}; choose from: {', '.join(kinds)}")
        try:
            return cls(shape, **{key: kinds[key](value) for key, value in given.items()})
        except ValueError:
            raise UnsupportedModel(f"{name}: noise must be a number and seed an integer") from None
