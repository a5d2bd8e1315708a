"""The weights of a draft under the names of its loader, checked before any value is read."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.weights import Weight
from paceline.models.draft_files.forms import FileWeights

Shape = tuple[int, ...]
_UNUSED = ("t2d", "rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
"""Ends of the names of weights that only training reads, or that follow from config.json."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedWeights:
    """`Weights` under other names."""

    stored: FileWeights
    stored_names: Mapping[str, str]
    """{name: name in the file}"""

    def names(self) -> frozenset[str]:
        return frozenset(self.stored_names)

    def shape(self, name: str) -> Shape:
        return self.stored.shape(self.stored_names[name])

    def matrix(self, name: str) -> Weight:
        return self.stored.matrix(self._name(name))

    def vector(self, name: str) -> Tensor:
        return self.stored.vector(self._name(name))

    def _name(self, name: str) -> str:
        if name not in self.stored_names:
            raise UnsupportedModel(f"the draft has no weight {name}")
        return self.stored_names[name]


def name_weights(
    source: str, stored: FileWeights, rename: Callable[[str], str], unused: Iterable[str] = ()
) -> NamedWeights:
    """The weights as `rename` names them, without those that no draft reads and those that end with one of `unused`. `source`
    is the draft's name."""
    names: dict[str, str] = {}
    for name in sorted(stored.names()):
        new = rename(name)
        if new.endswith((*_UNUSED, *unused)):
            continue
        if new in names:
            raise UnsupportedModel(f"{source} has {names[new]} and {name}, which are the same weight: remove one")
        names[new] = name
    return NamedWeights(stored, names)


def check_shapes(source: str, weights: NamedWeights, expected: Mapping[str, Shape]) -> None:
    """Raise `UnsupportedModel` unless the draft has the weights of `expected` in these shapes, and no others."""
    names = weights.names()
    missing = [name for name in expected if name not in names]
    if missing:
        raise UnsupportedModel(f"{source} has no weight {missing[0]}, which its config.json requires")
    unknown = sorted(names - expected.keys())
    if unknown:
        raise UnsupportedModel(
            f"{source} has the weight {weights.stored_names[unknown[0]]}, which its config.json does not account for: "
            "the head computes something that is not known"
        )
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise UnsupportedModel(
                f"{name} of {source} has the shape {weights.shape(name)}, and its config.json requires {shape}"
            )
    for name in sorted(names):
        if name not in ("d2t", "token_map") and not weights.stored.is_float(weights.stored_names[name]):
            raise UnsupportedModel(f"{name} of {source} is not float32, float16 or bfloat16")
