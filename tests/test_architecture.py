"""Rules for the structure of the package: imports, folder sizes, cycles, and writes across modules.

The import rules are the arrows of docs/architecture.md; a new arrow is a change of design. Every rule is tested on planted
violations, so that it cannot pass by finding nothing to check.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "paceline"

MAY_IMPORT = {
    "core": set(),
    "telemetry": set(),
    "model_files": set(),
    "policy": set(),
    "kernels": set(),
    "kv": set(),
    "requests": {"model_files"},
    "planning": {"policy"},
    "models": {"model_files", "kernels", "policy"},
    "wire": {"policy", "model_files"},
    "speculation": {"requests", "models", "kv", "kernels", "policy"},
    "engine": {"speculation", "requests", "model_files", "models", "kv", "kernels", "policy"},
    "transfer": {"wire", "models", "model_files", "kernels"},
    "targets": {"requests", "model_files", "kv", "policy", "wire"},
    "drafting": {"engine", "speculation", "models", "model_files", "kernels", "policy", "wire", "transfer"},
    "worker": {
        *("engine", "drafting", "transfer", "targets", "wire", "speculation", "models", "model_files", "kernels"),
        *("requests", "policy", "telemetry"),
    },
    "gateway": {"targets", "requests", "model_files", "policy", "wire", "telemetry"},
    "deploy": {"gateway", "worker", "targets", "wire", "policy", "model_files", "telemetry"},
}
"""Serving packages, and the packages that each may import besides itself and `core`. The order is from the bottom up."""

APPLICATIONS = {"tools", "vllm", "cli"}
"""Packages that are not serving. No serving package may import them."""

BASE = ["core", "policy", "planning", "model_files", "requests", "kernels", "kv", "models", "speculation", "engine"]
"""Packages that work with the base dependencies alone: no web framework, no Ray, no ZeroMQ."""

AT_IMPORT = {"torch", "numpy", "safetensors", "tokenizers"}
"""Third-party packages that base packages may import at module level."""

PURE = {"core", "policy", "planning"}
"""Base packages that import the standard library only."""

CLOCKS_AND_THREADS = {"time", "datetime", "threading", "socket"}
"""Modules of the standard library that `policy` does not import: time is an argument of its functions."""

WHEN_NEEDED = AT_IMPORT | {"triton", "gguf", "jinja2", "llguidance", "huggingface_hub"}
"""Third-party packages that a function of a base package may import."""

GPU = (
    *("kernels/gpu/", "models/runner/gpu/", "models/parallel/gpu.py", "models/decoder/gpu_ops.py"),
    *(
        "models/parallel/device_sum.py",
        "models/heads/eagle/eagle_gpu.py",
        "engine/graph/",
    ),
)
"""Modules that import triton: other modules import them inside functions only, after a CUDA device was found."""

ON_DEMAND = ("model_files/tokenizer/template_limits.py",)
"""Modules whose third-party packages are optional: other modules import them inside functions only."""

VOCABULARY = ("core", "kernels", "wire", "policy", "engine/step", "gateway/api", "models/families", "models/manifest")
"""Folders, with their sub-folders, whose files are public."""

MAX_FACE = 12
"""Names that the face of a folder hands on."""

MAX_MODULES = 15
"""Modules in one folder, without `__init__.py`."""

CROWDED = {"cli": "one file a command", "models/families": "one file a family"}
"""Folders with more modules, and why."""

MAX_LINES, MIN_LINES = 500, 60

SMALL = {
    "__main__.py": "`python -m paceline`",
    "cli/commands.py": "imports all commands, which the start of a server does not wait for",
    "cli/main.py": "works without the packages of the commands",
    "core/version.py": "the build reads it",
    "core/clock.py": "compiled",
    "core/kv_events.py": "compiled",
    "core/traffic.py": "every package uses it",
    "core/lazy_face.py": "every face uses it",
    "deploy/processes/cluster_file.py": "read before anything starts",
    "deploy/supervise.py": "the `main` of a child process",
    "engine/graph/selection.py": "without triton, so that a CPU can test it",
    "models/parallel/device_sum.py": "imports triton when it is loaded",
    "models/runners.py": "the only module that knows every runner",
    "speculation/draft_weights.py": "a file of its own closes no circle of modules",
    "speculation/verification/tree.py": "trees have tests of their own",
    "vllm/draft_worker.py": "the `main` of a child process",
    "vllm/graphs.py": "imports vLLM when it is loaded",
    "vllm/plugin.py": "the entry point that vLLM loads",
    "wire/codec.py": "the one codec of all messages",
}
"""Modules outside `kernels` with fewer lines, and why."""

ONE_USER = {
    "cli/application.py": "loads without the commands",
    "cli/commands.py": "imports all commands, which the start of a server does not wait for",
    "cli/doctor.py": "a command",
    "models/parallel/device_sum.py": "imports triton when it is loaded",
    "vllm/graphs.py": "imports vLLM when it is loaded",
    "vllm/plugin.py": "the entry point that vLLM loads",
}
"""Modules with one importer in their folder, fewer than 100 lines and no test file of their own, and why."""

PARTS = {
    "engine": "engine/engine.py",
    "scheduler": "engine/scheduler.py",
    "speculator": "engine/speculator.py",
    "loop": "engine/loop.py",
    "llm": "engine/start/llm.py",
    "executor": "engine/",
    "runner": "models/",
    "proposer": "speculation/proposers/",
}
"""Variable names that hold a part of the engine or server, and the module or folder that may write its attributes."""


# ---------------------------------------------------------------- imports


@dataclass(frozen=True)
class Import:
    package: str
    where: str
    module: str
    """The module that defines what is imported."""
    deferred: bool
    """True inside a function, or for type checkers only."""
    in_function: bool = False
    through: str = ""
    """The module or folder that the import names, if it is a face that hands the name on."""

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]

    @property
    def importer(self) -> str:
        """The dotted name of the importing module."""
        return _dotted(self.where.partition(":")[0])

    def __str__(self) -> str:
        return f"{self.where} imports {self.module}"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def sources(folder: Path = SOURCE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@cache
def imports(package: str) -> tuple[Import, ...]:
    return tuple(
        found
        for path in sources(SOURCE / package)
        for found in _imports(tree_of(path), package, str(path.relative_to(SOURCE)))
    )


def _imports(node: ast.AST, package: str, path: str, deferred: bool = False, inside: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # contains no import
            continue
        where = f"{path}:{getattr(child, 'lineno', 0)}"
        if isinstance(child, ast.Import):
            yield from (Import(package, where, alias.name, deferred, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{where}: use an absolute import"
            assert child.module is not None
            # `from paceline.kv import prefix` imports a module, `from paceline.kv.block_tables import BlockPool` a name in one
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                if child.module.startswith("paceline") and _is_module(inner):
                    yield Import(package, where, inner, deferred, inside)
                else:
                    module = face(child.module).get(alias.name, child.module)
                    yield Import(
                        package, where, module, deferred, inside, child.module if module != child.module else ""
                    )
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _imports(ast.Module(child.body, []), package, path, True, inside)
            yield from _imports(ast.Module(child.orelse, []), package, path, deferred, inside)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(child, package, path, deferred or is_function, inside or is_function)


@cache
def face(folder: str) -> dict[str, str]:
    """The names that the `__init__` of this folder hands on, and the module that defines each."""
    path = SOURCE.parent.joinpath(*folder.split("."), "__init__.py")
    if not folder.startswith("paceline.") or not path.is_file():
        return {}
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(folder)
        for alias in node.names
    }


def _is_module(dotted: str) -> bool:
    path = SOURCE.parent.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def _path(module: str) -> str:
    """`kernels/gpu/linear.py` of `paceline.kernels.gpu.linear`."""
    return module.removeprefix("paceline.").replace(".", "/") + ".py"


def _dotted(path: str) -> str:
    """`paceline.kernels.gpu.linear` of `kernels/gpu/linear.py`."""
    return ".".join(("paceline", *Path(path).with_suffix("").parts)).removesuffix(".__init__")


def _within(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(allowed + ".")


def all_imports() -> list[Import]:
    return [
        found
        for package in (*MAY_IMPORT, *APPLICATIONS)
        for found in imports(package)
        if not found.where.partition(":")[0].endswith("__init__.py")
    ]


def test_the_parser_finds_imports_of_every_kind() -> None:
    found = all_imports()
    assert {entry.package for entry in found} == set(MAY_IMPORT) | APPLICATIONS
    assert any(entry.module == "paceline.core.errors" for entry in found)
    assert any(entry.deferred and entry.root == "llguidance" for entry in found)
    assert any(not entry.deferred and entry.root == "torch" for entry in found)
    tree = ast.parse(
        "import a\nif TYPE_CHECKING:\n  import b\nelse:\n  import c\ntry:\n  import d\nexcept E:\n  pass\n"
        "def f():\n  import e\nclass C:\n  import g\n  def m(self):\n    from h import x\n"
    )
    seen = {entry.module: (entry.deferred, entry.in_function) for entry in _imports(tree, "core", "x.py")}
    plain, typing_only, inside = (False, False), (True, False), (True, True)
    assert seen == {"a": plain, "b": typing_only, "c": plain, "d": plain, "e": inside, "g": plain, "h": inside}


def outside_the_arrows(found: Iterable[Import]) -> list[str]:
    return [
        str(entry)
        for entry in found
        if entry.root == "paceline"
        and not any(
            _within(entry.module, f"paceline.{name}") for name in (*MAY_IMPORT[entry.package], entry.package, "core")
        )
    ]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_packages_below_them(package: str) -> None:
    wrong = outside_the_arrows(imports(package))
    assert not wrong, "\n".join(wrong)


def test_an_import_of_a_package_above_is_found() -> None:
    assert outside_the_arrows([Import("kv", "kv/x.py:1", "paceline.engine.engine", False)])
    assert outside_the_arrows([Import("kv", "kv/x.py:1", "paceline.kernels.linear", False)])


def missing_dependencies(found: Iterable[Import]) -> list[str]:
    def is_allowed(entry: Import) -> bool:
        if entry.root == "paceline" or entry.root in sys.stdlib_module_names:
            return True
        if entry.package in PURE:
            return False
        if entry.root == "triton" and entry.where.startswith("kernels/gpu/"):
            return True
        return entry.root in (WHEN_NEEDED if entry.deferred or entry.where.startswith(ON_DEMAND) else AT_IMPORT)

    return [str(entry) for entry in found if not is_allowed(entry)]


@pytest.mark.parametrize("package", BASE)
def test_base_packages_import_base_dependencies_only(package: str) -> None:
    wrong = missing_dependencies(imports(package))
    assert not wrong, "\n".join(wrong)


def test_an_import_beyond_the_base_dependencies_is_found() -> None:
    assert missing_dependencies([Import("core", "core/x.py:1", "torch", True)])
    assert missing_dependencies([Import("engine", "engine/x.py:1", "jinja2", False)])
    assert missing_dependencies([Import("engine", "engine/x.py:1", "zmq", True)])
    assert not missing_dependencies([Import("engine", "engine/x.py:1", "jinja2", True)])


def clocks_and_threads(found: Iterable[Import]) -> list[str]:
    return [str(entry) for entry in found if entry.package == "policy" and entry.root in CLOCKS_AND_THREADS]


def test_decisions_read_no_clock_and_start_no_thread() -> None:
    assert not clocks_and_threads(imports("policy"))


def test_a_clock_in_a_decision_is_found() -> None:
    assert clocks_and_threads([Import("policy", "policy/x.py:1", "time", True)])
    assert not clocks_and_threads([Import("engine", "engine/x.py:1", "time", True)])


def early_gpu_imports(found: Iterable[Import]) -> list[str]:
    return [
        str(entry)
        for entry in found
        if _path(entry.module).startswith((*GPU, *ON_DEMAND)) and not entry.deferred and not entry.where.startswith(GPU)
    ]


def test_gpu_modules_are_imported_only_when_needed() -> None:
    wrong = early_gpu_imports(all_imports())
    assert not wrong, "\n".join(wrong)


def test_an_early_gpu_import_is_found() -> None:
    assert early_gpu_imports([Import("engine", "engine/x.py:1", "paceline.kernels.gpu.linear", False)])
    assert not early_gpu_imports([Import("engine", "engine/x.py:1", "paceline.kernels.gpu.linear", True)])


def test_every_package_has_import_rules() -> None:
    """A new package needs a line in `MAY_IMPORT`, or in `APPLICATIONS` if no other package imports it."""
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert packages == set(MAY_IMPORT) | APPLICATIONS


# ---------------------------------------------------------------- cycles


def cycle(found: Iterable[Import]) -> list[str] | None:
    """The modules of one circular import, or None."""
    graph: dict[str, set[str]] = {}
    for entry in found:
        if entry.root == "paceline" and entry.module != entry.importer:
            graph.setdefault(entry.importer, set()).add(entry.module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        modules: list[str] = error.args[1]
        return modules
    return None


def test_imports_at_module_level_and_for_types_have_no_cycle() -> None:
    found = cycle(entry for entry in all_imports() if not entry.in_function)
    assert found is None, " <- ".join(found or ())


@pytest.mark.parametrize("package", [*MAY_IMPORT, *sorted(APPLICATIONS)])
def test_imports_inside_functions_close_no_cycle_within_a_package(package: str) -> None:
    inner = (entry for entry in imports(package) if _within(entry.module, f"paceline.{package}"))
    found = cycle(inner)
    assert found is None, " <- ".join(found or ())


def test_a_cycle_is_found() -> None:
    there = Import("kv", "kv/a.py:1", "paceline.kv.b", False)
    back = Import("kv", "kv/b.py:1", "paceline.kv.a", True, True)
    assert cycle([there, back]) is not None
    assert cycle([there, Import("kv", "kv/b.py:1", "paceline.kv.c", False)]) is None


# ---------------------------------------------------------------- folders


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def folder_circle(found: Iterable[Import]) -> list[str] | None:
    """Folders that import each other, or None. A sub-folder is a folder of its own; imports of every kind count."""
    graph: dict[str, set[str]] = {}
    for entry in found:
        if entry.root == "paceline":
            importer, imported = _folder(_path(entry.importer)), _folder(_path(entry.module))
            if importer != imported and imported:
                graph.setdefault(importer, set()).add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        folders: list[str] = error.args[1]
        return folders
    return None


def test_folders_do_not_import_each_other() -> None:
    found = folder_circle(all_imports())
    assert found is None, " <- ".join(found or ())


def test_a_circle_of_folders_is_found() -> None:
    there = Import("kv", "kv/a.py:1", "paceline.kv.tiers.store", False)
    back = Import("kv", "kv/tiers/store.py:1", "paceline.kv.b", True, True)
    assert folder_circle([there, back]) is not None
    assert folder_circle([there, Import("kv", "kv/b.py:1", "paceline.kv.a", False)]) is None


def around_a_face(found: Iterable[Import]) -> list[str]:
    """Imports from outside a folder that name a file in it."""

    def is_public(folder: str) -> bool:
        return not folder or any(folder == name or folder.startswith(name + "/") for name in VOCABULARY)

    return [
        str(entry)
        for entry in found
        if entry.root == "paceline" and not entry.through
        for folder in [_folder(_path(entry.module))]
        if folder != _folder(entry.where.partition(":")[0]) and not is_public(folder)
    ]


def test_imports_from_outside_name_the_folder() -> None:
    wrong = around_a_face(all_imports())
    assert not wrong, "\n".join(wrong)


def test_an_import_around_a_face_is_found() -> None:
    assert around_a_face([Import("engine", "engine/x.py:1", "paceline.kv.prefix", True)])
    assert not around_a_face([Import("kv", "kv/x.py:1", "paceline.kv.prefix", False)])
    assert not around_a_face([Import("engine", "engine/x.py:1", "paceline.kernels.gpu.linear", True)])
    assert not around_a_face([Import("engine", "engine/x.py:1", "paceline.kv.prefix", True, True, "paceline.kv")])


def faults_of_a_face(source: str, used: set[str]) -> list[str]:
    """What is wrong with the `__init__` of a folder, of whose names others import `used`."""
    tree = ast.parse(source)
    found = []
    names: set[str] = set()
    handed_on = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module not in ("typing", "paceline.core.lazy_face")
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            if module not in ("typing", "paceline.core.lazy_face"):
                found.append(f"imports {module} when it is loaded")
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = set(ast.literal_eval(node.value))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__getattr__":
            assert isinstance(node.value, ast.Call)
            loaded = " ".join(ast.literal_eval(node.value.args[1]).values()).split()
            if set(loaded) != handed_on:
                found.append(f"lazy_face and its imports differ in {sorted(set(loaded) ^ handed_on)}")
    if len(names) > MAX_FACE:
        found.append(f"hands on {len(names)} names")
    if names != handed_on:
        found.append(f"__all__ and its imports differ in {sorted(names ^ handed_on)}")
    if names - used:
        found.append(f"no other folder imports {sorted(names - used)}")
    return found


def test_faces_are_small_and_used_and_load_nothing() -> None:
    used: dict[str, set[str]] = {}
    for path in [*sources(), SOURCE / "__init__.py"]:
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and path.parent != SOURCE.parent.joinpath(*node.module.split("."))
            ):
                used.setdefault(node.module, set()).update(alias.name for alias in node.names)
    configured_by_name = {"vllm"}  # configurations of vLLM name them
    wrong = [
        f"{path.parent.relative_to(SOURCE)}: {fault}"
        for path in sources()
        if path.name == "__init__.py" and path.parent != SOURCE and path.parent.name not in configured_by_name
        for fault in faults_of_a_face(path.read_text("utf-8"), used.get(_dotted(str(path.relative_to(SOURCE))), set()))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_bad_face_is_found() -> None:
    good = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from paceline.kv.a import A\n__all__ = ['A']\n"
    assert not faults_of_a_face(good, {"A"})
    assert not faults_of_a_face(good + "__getattr__ = lazy_face(__name__, {'a': 'A'})", {"A"})
    assert faults_of_a_face(good + "__getattr__ = lazy_face(__name__, {'a': 'B'})", {"A"})
    assert faults_of_a_face(good, set()) == ["no other folder imports ['A']"]
    assert faults_of_a_face(good.replace("['A']", "['A', 'B']"), {"A", "B"})
    assert faults_of_a_face("from paceline.kv.a import A\n__all__ = ['A']", {"A"}) == [
        "imports paceline.kv.a when it is loaded"
    ]
    many = [f"N{i}" for i in range(MAX_FACE + 1)]
    imported = f"if TYPE_CHECKING:\n  from paceline.kv.a import {', '.join(many)}\n__all__ = {many}"
    assert faults_of_a_face(imported, set(many)) == [f"hands on {MAX_FACE + 1} names"]


def crowded(counts: Mapping[str, int]) -> list[str]:
    return [
        f"{folder}: {count} modules"
        for folder, count in counts.items()
        if count > MAX_MODULES and folder not in CROWDED
    ]


def test_no_folder_has_too_many_modules() -> None:
    counts: dict[str, int] = {}
    for path in sources():
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(SOURCE))
            counts[folder] = counts.get(folder, 0) + 1
    assert len(counts) > 20
    assert not crowded(counts), "\n".join(crowded(counts))


def test_a_crowded_folder_is_found() -> None:
    assert crowded({"a": MAX_MODULES, "b": MAX_MODULES + 1}) == [f"b: {MAX_MODULES + 1} modules"]


# ---------------------------------------------------------------- files


def line_counts() -> dict[str, int]:
    return {
        str(path.relative_to(SOURCE)): len(path.read_text("utf-8").splitlines())
        for path in sources()
        if path.name != "__init__.py"
    }


def wrong_sizes(counts: Mapping[str, int]) -> list[str]:
    """Modules that are too long or too short, and entries of `SMALL` without a reason to be there."""

    def is_free(path: str) -> bool:
        return path.startswith(("kernels/", "models/families/")) or path in SMALL

    found = [f"{path} has {lines} lines" for path, lines in counts.items() if lines > MAX_LINES]
    found += [f"{path} has {lines} lines" for path, lines in counts.items() if lines < MIN_LINES and not is_free(path)]
    return found + [f"SMALL: {path}" for path in SMALL if counts.get(path, MIN_LINES) >= MIN_LINES]


def test_modules_are_neither_long_nor_short() -> None:
    wrong = wrong_sizes(line_counts())
    assert not wrong, "\n".join(wrong)


def test_a_long_and_a_short_module_are_found() -> None:
    small = dict.fromkeys(SMALL, MIN_LINES - 1)
    assert wrong_sizes({**small, "kv/a.py": MAX_LINES + 1}) == [f"kv/a.py has {MAX_LINES + 1} lines"]
    assert wrong_sizes({**small, "kv/a.py": MIN_LINES - 1}) == [f"kv/a.py has {MIN_LINES - 1} lines"]
    assert not wrong_sizes({**small, "kv/a.py": MIN_LINES, "kernels/a.py": 1})
    assert wrong_sizes({})


def small_parts_of_one_user(found: Iterable[Import], counts: Mapping[str, int], tested: set[str]) -> list[str]:
    """Modules that belong into the file of their only user."""
    users: dict[str, set[str]] = {}
    for entry in found:
        if entry.root == "paceline":
            users.setdefault(_path(entry.module), set()).add(entry.where.partition(":")[0])
    return [
        f"{path} has one user, {next(iter(users[path]))}"
        for path, lines in counts.items()
        if lines < 100 and len(users.get(path, ())) == 1 and path not in ONE_USER
        if _folder(next(iter(users[path]))) == _folder(path) and Path(path).stem not in tested
    ]


def test_small_parts_live_with_their_only_user() -> None:
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}
    wrong = small_parts_of_one_user(all_imports(), line_counts(), tested)
    assert not wrong, "\n".join(wrong)


def test_a_small_part_of_one_user_is_found() -> None:
    found = [Import("kv", "kv/a.py:1", "paceline.kv.b", False)]
    assert small_parts_of_one_user(found, {"kv/b.py": 99}, set())
    assert not small_parts_of_one_user(found, {"kv/b.py": 100}, set())
    assert not small_parts_of_one_user(found, {"kv/b.py": 99}, {"b"})
    assert not small_parts_of_one_user(
        [*found, Import("kv", "kv/c.py:1", "paceline.kv.b", False)], {"kv/b.py": 99}, set()
    )


# ---------------------------------------------------------------- names


def shared_names(trees: Iterable[tuple[str, ast.Module]]) -> list[str]:
    """Public classes of the same name in two modules."""
    homes: dict[str, list[str]] = {}
    for file, tree in trees:
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(file)
    return [f"{name}: {', '.join(files)}" for name, files in homes.items() if len(files) > 1]


def named_one(tree: ast.AST) -> list[int]:
    """Lines that bind a variable or parameter called `one`."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == "one" and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.arg) and node.arg == "one")
    ]


def test_no_two_public_classes_share_a_name() -> None:
    serving = [path for package in MAY_IMPORT for path in sources(SOURCE / package)]
    wrong = shared_names((str(path.relative_to(SOURCE)), tree_of(path)) for path in serving)
    assert not wrong, "\n".join(wrong)


def test_no_variable_is_called_one() -> None:
    kernels = SOURCE / "kernels" / "gpu"  # "one" is the number there, and a change would compile the kernels again
    wrong = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sources()
        if not path.is_relative_to(kernels)
        for line in named_one(tree_of(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_shared_name_and_a_variable_called_one_are_found() -> None:
    trees = [("a.py", ast.parse("class A: ...\nclass _B: ...")), ("b.py", ast.parse("class A: ...\nclass _B: ..."))]
    assert shared_names(trees) == ["A: a.py, b.py"]
    assert named_one(ast.parse("one = 1\ndef f(one): ...\n")) == [1, 2]


# ---------------------------------------------------------------- docstrings of packages


def lacks_one_line_docstring(source: str) -> bool:
    docstring = ast.get_docstring(ast.parse(source), clean=False)
    return not docstring or "\n" in docstring.strip()


def test_every_package_has_a_one_line_docstring() -> None:
    folders = {path.parent for path in sources()}
    wrong = [
        str(folder.relative_to(SOURCE))
        for folder in sorted(folders)
        if not (folder / "__init__.py").is_file()
        or lacks_one_line_docstring((folder / "__init__.py").read_text("utf-8"))
    ]
    assert not wrong, wrong


def test_a_missing_or_long_docstring_is_found() -> None:
    assert lacks_one_line_docstring("")
    assert lacks_one_line_docstring('"""One.\n\nTwo."""\n')
    assert not lacks_one_line_docstring('"""One."""\n')


# ---------------------------------------------------------------- writes across modules, and types of proposers


def _last_name(node: ast.expr) -> str | None:
    """`engine` of `engine`, `self.engine` and `self._engine`."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
    return name.lstrip("_") if name else None


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        waiting = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
        waiting = [node.target]
    else:
        waiting = [item.optional_vars for item in getattr(node, "items", ()) if getattr(item, "optional_vars", None)]
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        else:
            yield target


def writes_into_parts(tree: ast.AST, file: str) -> list[str]:
    """Assignments to attributes of the parts in `PARTS`, and calls of `setattr` for them, outside the part's own module."""

    def is_foreign(node: ast.expr) -> bool:
        name = _last_name(node)
        return name in PARTS and not file.startswith(PARTS[name])

    found = []
    for node in ast.walk(tree):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and is_foreign(target.value):
                found.append(f"{file}:{target.lineno}: {ast.unparse(target)} is assigned")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("setattr", "delattr")
            and node.args
            and is_foreign(node.args[0])
        ):
            found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_parts_are_written_by_their_own_module_only() -> None:
    wrong = [line for path in sources() for line in writes_into_parts(tree_of(path), str(path.relative_to(SOURCE)))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("engine.hooks = ()", 1),
        ("self.engine.ahead: int = 1", 1),
        ("llm._scheduler.limit += 1", 1),
        ("a, (speculator.depth, b) = 1, (2, 3)", 1),
        ("with x as engine.y: pass", 1),
        ("setattr(loop, 'run', run)", 1),
        ("del engine.step", 1),
        ("self.engine = engine", 0),
        ("engine = Engine()", 0),
        ("engine.step()", 0),
        ("engine.totals['x'] = 1", 0),
    ],
)
def test_a_write_into_a_part_is_found(source: str, count: int) -> None:
    assert len(writes_into_parts(ast.parse(source), "bench/x.py")) == count
    assert not writes_into_parts(ast.parse("engine.hooks = ()"), "engine/engine.py")


def proposer_classes(trees: Iterable[ast.AST]) -> set[str]:
    """Classes with the methods of a `Proposer`, and their subclasses."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {
        entry.name
        for entry in classes
        if {"observe", "collect"} <= {item.name for item in entry.body if isinstance(item, ast.FunctionDef)}
    }
    return names | {entry.name for entry in classes if any(_last_name(base) in names for base in entry.bases)}


def type_tests(tree: ast.AST, names: set[str], file: str) -> list[str]:
    """Calls of `isinstance` with one of `names`, `match` patterns of one, and `getattr` of a proposer."""
    found = []
    for node in ast.walk(tree):
        tested: list[ast.expr] = []
        if isinstance(node, ast.MatchClass):
            tested = [node.cls]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2:
            if node.func.id in ("isinstance", "issubclass"):
                tested = [entry for entry in ast.walk(node.args[1]) if isinstance(entry, ast.Name | ast.Attribute)]
            elif node.func.id in ("getattr", "hasattr") and _last_name(node.args[0]) == "proposer":
                found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
        if any(_last_name(entry) in names for entry in tested):
            found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    return found


def test_types_of_proposers_are_tested_only_among_proposers() -> None:
    home = SOURCE / "speculation" / "proposers"
    names = proposer_classes(
        tree_of(path) for path in sources() if path.is_relative_to(home) or path.parent.name == "drafting"
    )
    assert {"NgramProposer", "EagleProposer", "DraftModelProposer"} <= names
    wrong = [
        line
        for path in sources()
        if not path.is_relative_to(home)
        for line in type_tests(tree_of(path), names, str(path.relative_to(SOURCE)))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_type_test_of_a_proposer_is_found() -> None:
    methods = "  def observe(self): ...\n  def collect(self): ...\n"
    names = proposer_classes([ast.parse(f"class A:\n{methods}class B(A): ...\nclass C:\n  def observe(self): ...\n")])
    assert names == {"A", "B"}
    for source in (
        "isinstance(x, A)",
        "isinstance(x, (int, m.B))",
        "isinstance(x, A | None)",
        "getattr(self.proposer, 'wants', None)",
        "match x:\n  case B(): pass",
    ):
        assert type_tests(ast.parse(source), names, "x.py"), source
    assert not type_tests(ast.parse("isinstance(x, C)\ngetattr(other, 'wants')"), names, "x.py")


# ---------------------------------------------------------------- one forward pass

ATTENTION_KERNELS = ("paceline.kernels.attention", "paceline.kernels.gpu.attention.paged", "paceline.kernels.rotary")
OPS = ("models/decoder/ops.py", "models/decoder/gpu_ops.py")
"""The operations of a forward pass. The sequence of a layer is written once, over them, in `models/decoder/passes.py`."""


def second_passes(found: Iterable[Import]) -> list[str]:
    """Imports of attention outside the operations: a module that has one writes the sequence of a layer again."""
    return [str(each) for each in found if each.module in ATTENTION_KERNELS and each.where.partition(":")[0] not in OPS]


def test_the_sequence_of_a_layer_is_written_once() -> None:
    wrong = second_passes(all_imports())
    assert not wrong, "\n".join(wrong)


def test_a_second_forward_pass_is_found() -> None:
    module = "paceline.kernels.attention"
    assert second_passes([Import("models", "models/heads/eagle/eagle.py:3", module, True)])
    assert not second_passes([Import("models", "models/decoder/ops.py:3", module, False)])


# ---------------------------------------------------------------- imports in a process of their own


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_paceline_alone_does_not_import_torch() -> None:
    loaded = run("import sys, paceline; paceline.SamplingParams(); print(*sys.modules)").split()
    assert "paceline.core.request" in loaded
    assert not {name.partition(".")[0] for name in loaded} & WHEN_NEEDED


IMPORT_ALL = """
import importlib, pathlib, sys, traceback

class Blocker:
    # Refuses `blocked` packages always, and packages outside `allowed` when a file of ours imports them: what torch itself
    # imports is not checked.
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root in blocked:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
        if allowed is None or root in sys.stdlib_module_names or root == "paceline" or root in allowed:
            return None
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if str(source) in frame.f_code.co_filename:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
        return None

sys.meta_path.insert(0, Blocker())
failed = []
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        chain = [str(pathlib.Path(file).relative_to(source)) for file in frames if file.startswith(str(source))]
        failed.append(f"{name}: {error} ({' -> '.join(chain)})")
if failed:
    sys.exit("\\n".join(failed))
"""


def import_all(names: Iterable[str], blocked: Iterable[str], allowed: Iterable[str] | None = None) -> None:
    """Imports these modules in a new process, without the packages `blocked` and, if given, with those `allowed` only."""
    values = {
        "names": list(names),
        "blocked": sorted(blocked),
        "allowed": sorted(allowed) if allowed is not None else None,
    }
    assert values["names"]
    head = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    run(f"import pathlib\nsource = pathlib.Path({str(SOURCE)!r})\n{head}{IMPORT_ALL}")


def modules_of(*packages: str) -> list[str]:
    paths = [str(path.relative_to(SOURCE)) for package in packages for path in sources(SOURCE / package)]
    return [_dotted(path) for path in paths if not path.startswith((*GPU, *ON_DEMAND))]


def test_engine_and_below_import_with_the_base_packages_alone() -> None:
    import_all(modules_of(*BASE), blocked=WHEN_NEEDED - AT_IMPORT - {"triton"}, allowed=AT_IMPORT)


def test_the_gateway_imports_without_torch() -> None:
    import_all(
        modules_of(
            "gateway", "targets", "wire", "requests", "model_files", "telemetry", "planning", "tools/orchestrate"
        ),
        blocked={"torch", "triton", "safetensors"},
    )


def test_a_blocked_import_fails() -> None:
    with pytest.raises(AssertionError, match="blocked: torch"):
        import_all(["paceline.engine.engine"], blocked={"torch"})
    with pytest.raises(AssertionError, match="blocked: fastapi"):
        import_all(["paceline.gateway.http.app"], blocked=(), allowed=AT_IMPORT)
