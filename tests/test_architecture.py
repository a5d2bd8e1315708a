"""Who may import whom. The arrows are those of docs/architecture.md: to need another one is a change of design."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "paceline"

MAY_IMPORT = {
    "core": set(),
    "kernels": {"core"},
    "models": {"kernels", "core"},
    "kv": {"kernels.layout", "core"},
    "speculation": {"models", "kv", "kernels", "core"},
    "engine": {"speculation", "models", "kv", "kernels", "core"},
    "cluster": {"core"},
    "runtime": {"engine", "cluster", "speculation", "models", "kv", "kernels", "core"},
    "server": {"runtime", "engine", "cluster", "speculation", "models", "kv", "kernels", "core"},
}
"""Packages, or single modules of one, besides the package itself. What is not listed here may import all of these."""

BASE = [package for package in MAY_IMPORT if package not in ("runtime", "server")]
"""What works with the base packages alone: no web framework, no Ray, no ZeroMQ."""

AT_IMPORT = {"torch", "numpy", "safetensors", "tokenizers"}
"""Third-party packages that these may import at module level, those in `PURE` none of them."""

PURE = {"core", "cluster"}

WHEN_NEEDED = AT_IMPORT | {"triton", "gguf", "jinja2", "llguidance", "huggingface_hub"}
"""And those that a function may import when it is first called."""

GPU = (
    "kernels/gpu/",
    "models/gpu/",
    "engine/executors/graph/",
)
"""What is imported only where there is a CUDA device. The kernels import triton, so nobody else may import these at module
level."""


@dataclass(frozen=True)
class Import:
    package: str
    where: str
    module: str
    deferred: bool
    """Inside a function, or for type checkers only."""

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.where} imports {self.module}"


def imports(package: str) -> Iterator[Import]:
    for path in sorted((SOURCE / package).rglob("*.py")):
        yield from _imports(ast.parse(path.read_text("utf-8")), package, path, deferred=False)


def _imports(node: ast.AST, package: str, path: Path, deferred: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        where = f"{path.relative_to(SOURCE)}:{getattr(child, 'lineno', 0)}"
        if isinstance(child, ast.Import):
            yield from (Import(package, where, alias.name, deferred) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{where}: imports are absolute here"
            assert child.module is not None
            # `from paceline.kv import pool` names a module, `from paceline.kv.block_pool import BlockPool` a thing in one
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                is_module = child.module.startswith("paceline") and _is_module(inner)
                yield Import(package, where, inner if is_module else child.module, deferred)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _imports(ast.Module(child.body, []), package, path, deferred=True)
            yield from _imports(ast.Module(child.orelse, []), package, path, deferred)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, path, deferred or is_function)


def _is_module(dotted: str) -> bool:
    path = SOURCE.parent.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def _path(module: str) -> str:
    """`kernels/gpu/speculation/pick.py` of `paceline.kernels.gpu.speculation.pick`."""
    return module.removeprefix("paceline.").replace(".", "/") + ".py"


def _within(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(allowed + ".")


ALL = [found for package in MAY_IMPORT for found in imports(package)]


def test_the_parser_sees_imports_of_every_kind() -> None:
    """A test that finds nothing passes: make sure this one looks."""
    assert {found.package for found in ALL} == set(MAY_IMPORT)
    assert any(found.module == "paceline.core.errors" for found in ALL)
    assert any(found.deferred and found.root == "llguidance" for found in ALL)
    assert any(not found.deferred and found.root == "torch" for found in ALL)
    tree = ast.parse(
        "import a\nif TYPE_CHECKING:\n  import b\nelse:\n  import c\ntry:\n  import d\nexcept E:\n  pass\n"
        "def f():\n  import e\nclass C:\n  import g\n  def m(self):\n    from h import x\n"
    )
    seen = {found.module: found.deferred for found in _imports(tree, "core", SOURCE / "x.py", False)}
    assert seen == {"a": False, "b": True, "c": False, "d": False, "e": True, "g": False, "h": True}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_lies_below_them(package: str) -> None:
    allowed = {f"paceline.{name}" for name in MAY_IMPORT[package] | {package}}
    wrong = [
        str(found)
        for found in imports(package)
        if found.root == "paceline" and not any(_within(found.module, name) for name in allowed)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", BASE)
def test_third_party_packages(package: str) -> None:
    at_import, when_needed = (set(), set()) if package in PURE else (AT_IMPORT, WHEN_NEEDED)
    wrong = [
        str(found)
        for found in imports(package)
        if found.root != "paceline"
        and found.root not in sys.stdlib_module_names
        and found.root not in (when_needed if found.deferred else at_import)
        and not (found.root == "triton" and found.where.startswith(GPU[0]))
    ]
    assert not wrong, "\n".join(wrong)


def test_gpu_modules_are_imported_only_when_needed() -> None:
    wrong = [
        str(found)
        for found in ALL
        if _path(found.module).startswith(GPU) and not found.deferred and not found.where.startswith(GPU)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_is_held_to_the_rules() -> None:
    """A new package needs its line in `MAY_IMPORT`, unless it is a use of the parts and no part: nothing imports those."""
    above = {"train", "audit", "bench", "cli"}
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert packages - above == set(MAY_IMPORT)


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_paceline_alone_does_not_import_torch() -> None:
    loaded = run("import sys, paceline; paceline.SamplingParams(); print(*sys.modules)").split()
    assert "paceline.core.sampling" in loaded
    assert not {name.partition(".")[0] for name in loaded} & WHEN_NEEDED


EVERYTHING_WITH_NOTHING_ELSE = f"""
import importlib, pathlib, sys, traceback

BLOCKED = {sorted(WHEN_NEEDED - AT_IMPORT - {"triton"})}

class Blocker:
    # Refuses what our own files ask for beyond the base packages and the standard library. What torch itself imports
    # is torch's business, so the asking frame decides.
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root in BLOCKED:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
        if root in sys.stdlib_module_names or root == "paceline" or root in {sorted(AT_IMPORT)}:
            return None
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if {str(SOURCE)!r} in frame.f_code.co_filename:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
        return None

sys.meta_path.insert(0, Blocker())
source = pathlib.Path({str(SOURCE)!r})
failed = []
count = 0
for package in {BASE}:
    for path in sorted((source / package).rglob("*.py")):
        if str(path.relative_to(source)).startswith({GPU!r}):
            continue
        name = ".".join(("paceline", *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__")
        count += 1
        try:
            importlib.import_module(name)
        except Exception:
            failed.append(traceback.format_exc())
if failed:
    sys.exit("".join(failed))
print(count)
"""


def test_engine_and_below_import_with_the_base_packages_alone() -> None:
    assert int(run(EVERYTHING_WITH_NOTHING_ELSE)) > 30
