"""The face of a folder: the names that it hands on, loaded when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_face(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose `names` live in its modules: `names` maps each name to its module.

    An import of the package alone loads none of its modules, so that a process pays only for what it uses.
    """

    def get(name: str) -> Any:
        module = names.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module}"), name)

    return get
