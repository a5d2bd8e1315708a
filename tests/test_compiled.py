"""The modules that setup.py compiles."""

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES: list[str] = runpy.run_path(str(ROOT / "setup.py"))["MODULES"]


def decorators(source: str) -> set[str]:
    """Names of all decorators in a module, without the modules that they come from."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for one in node.decorator_list:
                called = one.func if isinstance(one, ast.Call) else one
                found.add(called.attr if isinstance(called, ast.Attribute) else ast.unparse(called))
    return found


def test_decorators_are_found() -> None:
    source = "class A:\n    @functools.cached_property\n    def b(self): ...\n    @lru_cache(2)\n    def c(self): ..."
    assert decorators(source) == {"cached_property", "lru_cache"}


@pytest.mark.parametrize("module", MODULES)
def test_a_compiled_module_has_no_cached_property(module: str) -> None:
    """mypyc makes a plain property of it, which computes its value at every access."""
    assert "cached_property" not in decorators((ROOT / module).read_text())


def test_every_compiled_module_is_named_once() -> None:
    assert len(set(MODULES)) == len(MODULES) > 0
