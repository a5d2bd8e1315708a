"""The supported families. Each is a function in a module of this folder, marked with `@family`, that describes a model.

All modules of the folder are imported when a family is first asked for, so that a new file is a new family.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from paceline.models.families.fields import Fields
from paceline.models.families.spec import DecoderSpec

Describe = Callable[[Fields], DecoderSpec]


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How a family stores its weights where it differs from Llama and Qwen3-MoE."""

    norms: Literal["w", "w - 1"] = "w"
    experts: Literal["separate", "joined"] = "separate"
    """`joined`: one tensor has all experts, with gate and up in alternating columns, and the router is called `router`."""
    is_fused: bool = False
    """Whether `qkv_proj` has the rows of q, k and v, and `gate_up_proj` those of gate and up, one part after the other."""
    has_adjacent_pairs: bool = False
    """Whether the rotary pairs of q and k are adjacent rows, not half of the rotated rows apart."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of names, as (name of Llama or Qwen3-MoE, stored name)."""


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    """Its `model_type` in config.json."""
    describe: Describe
    gguf: str | None
    """Its `general.architecture` in GGUF files. None if these are not supported."""
    has_adjacent_pairs: bool
    """Whether GGUF files store rotary pairs of q and k in adjacent rows, not half of the rotated rows apart."""
    stored: StoredForm
    """How folders with safetensors store the weights."""
    defaults: Mapping[str, Any]
    """Values that a config.json of the family leaves out."""


_FAMILIES: dict[str, Family] = {}


def family(
    name: str,
    gguf: str | None = None,
    has_adjacent_pairs: bool = False,
    stored: StoredForm | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[Describe], Describe]:
    """Register the function that describes the models of a family."""

    def register(describe: Describe) -> Describe:
        _FAMILIES[name] = Family(name, describe, gguf, has_adjacent_pairs, stored or StoredForm(), defaults or {})
        return describe

    return register


@cache
def families() -> dict[str, Family]:
    """All families by name, those with the stored form of Llama first."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
    return dict(sorted(_FAMILIES.items(), key=lambda item: (item[1].stored != StoredForm(), item[0])))


@cache
def gguf_families() -> dict[str, Family]:
    """The families of GGUF files, by `general.architecture`. Mistral files have the name llama."""
    return {found.gguf: found for found in families().values() if found.gguf is not None}


def family_of(spec: DecoderSpec) -> Family:
    return families()[spec.architecture]
