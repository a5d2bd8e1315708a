"""The name of an inflated model: a small model computed in the shape of a large one. See `architectures/inflate.py`."""

from dataclasses import dataclass
from urllib.parse import parse_qsl

from paceline.core.errors import UnsupportedModel
from paceline.models.loading.hub import EMBEDDED

PREFIX = "inflate:"
"""A model named `inflate:llama-8b?base=smollm2&noise=0.06&seed=0` is made, not read."""


@dataclass(frozen=True, slots=True)
class Shape:
    hidden_size: int
    num_layers: int
    """At the least: a small model with more layers keeps them all."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int


SHAPES = {
    "llama-1b": Shape(2048, 16, 32, 8, 64, 8192),
    "llama-8b": Shape(4096, 32, 32, 8, 128, 14336),
    "llama-70b": Shape(8192, 80, 64, 8, 128, 28672),
}


@dataclass(frozen=True, slots=True)
class Inflation:
    """What to make. `noise` is added to the small model's layers, in deviations of each matrix: it lowers the alpha of a
    draft that follows the small model. Noise depends on `seed` alone, filler on the device too."""

    shape: str
    base: str = EMBEDDED
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UnsupportedModel(f"shape {self.shape!r} is not known; choose from: {', '.join(SHAPES)}")
        if self.noise < 0:
            raise UnsupportedModel(f"noise must be 0 or more deviations of a weight, got {self.noise}")

    @classmethod
    def parse(cls, name: str) -> "Inflation":
        """From `inflate:SHAPE?base=…&noise=…&seed=…`, each of them optional."""
        shape, _, query = name.removeprefix(PREFIX).partition("?")
        kinds = {"base": str, "noise": float, "seed": int}
        given = dict(parse_qsl(query, keep_blank_values=True))
        unknown = sorted(given.keys() - kinds.keys())
        if unknown:
            raise UnsupportedModel(f"{name}: {unknown[0]!r} is not known; choose from: {', '.join(kinds)}")
        try:
            return cls(shape, **{key: kinds[key](value) for key, value in given.items()})
        except ValueError:
            raise UnsupportedModel(f"{name}: noise must be a number and seed a whole number") from None
