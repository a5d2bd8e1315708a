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
    "kernels": {"core"},
    "models": {"kernels", "cluster.step", "core"},
    "kv": {"kernels.layout", "core"},
    "speculation": {"models", "kv", "kernels", "cluster.step", "core"},
    "engine": {"speculation", "models", "kv", "kernels", "cluster.step", "core"},
    "cluster": {"core"},
    "planning": {"cluster", "speculation.depth", "core"},
    "endpoints": {"engine.stats", "speculation.depth", "speculation.depth_rule", "core"},
    "runtime": {"engine", "cluster", "speculation", "models", "kv", "kernels", "core"},
    "server": {"runtime", "engine", "cluster", "speculation", "models", "kv", "kernels", "core"},
}
"""Packages, or single modules of one, that a package may import besides itself."""

APPLICATIONS = {"train", "learning", "audit", "bench", "cli", "vllm"}
"""Packages that may import everything; the packages above may not import them."""

BASE = [package for package in MAY_IMPORT if package not in ("endpoints", "runtime", "server")]
"""Packages that work with the base dependencies alone: no web framework, no Ray, no ZeroMQ."""

AT_IMPORT = {"torch", "numpy", "safetensors", "tokenizers"}
"""Third-party packages that base packages may import at module level."""

PURE = {"core", "cluster", "planning"}
"""Base packages that import the standard library only."""

WHEN_NEEDED = AT_IMPORT | {"triton", "gguf", "jinja2", "llguidance", "huggingface_hub"}
"""Third-party packages that a function of a base package may import."""

GPU = ("kernels/gpu/", "models/gpu/", "engine/executors/graph/")
"""Folders that import triton: other modules import them inside functions only, after a CUDA device was found."""

ON_DEMAND = ("model_files/tokenizer/template_limits.py",)
"""Modules whose third-party packages are optional: other modules import them inside functions only."""

MAX_MODULES = 16
"""Modules in one folder, without `__init__.py`."""

PARTS = {
    "engine": "engine/engine.py",
    "scheduler": "engine/scheduler.py",
    "speculator": "engine/speculator.py",
    "loop": "engine/loop.py",
    "llm": "engine/start/llm.py",
    "executor": "engine/executors/",
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
    deferred: bool
    """True inside a function, or for type checkers only."""
    in_function: bool = False

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
                is_module = child.module.startswith("paceline") and _is_module(inner)
                yield Import(package, where, inner if is_module else child.module, deferred, inside)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _imports(ast.Module(child.body, []), package, path, True, inside)
            yield from _imports(ast.Module(child.orelse, []), package, path, deferred, inside)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(child, package, path, deferred or is_function, inside or is_function)


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
    return [found for package in (*MAY_IMPORT, *APPLICATIONS) for found in imports(package)]


def test_the_parser_finds_imports_of_every_kind() -> None:
    found = all_imports()
    assert {one.package for one in found} == set(MAY_IMPORT) | APPLICATIONS
    assert any(one.module == "paceline.core.errors" for one in found)
    assert any(one.deferred and one.root == "llguidance" for one in found)
    assert any(not one.deferred and one.root == "torch" for one in found)
    tree = ast.parse(
        "import a\nif TYPE_CHECKING:\n  import b\nelse:\n  import c\ntry:\n  import d\nexcept E:\n  pass\n"
        "def f():\n  import e\nclass C:\n  import g\n  def m(self):\n    from h import x\n"
    )
    seen = {one.module: (one.deferred, one.in_function) for one in _imports(tree, "core", "x.py")}
    plain, typing_only, inside = (False, False), (True, False), (True, True)
    assert seen == {"a": plain, "b": typing_only, "c": plain, "d": plain, "e": inside, "g": plain, "h": inside}


def outside_the_arrows(found: Iterable[Import]) -> list[str]:
    return [
        str(one)
        for one in found
        if one.root == "paceline"
        and not any(_within(one.module, f"paceline.{name}") for name in MAY_IMPORT[one.package] | {one.package})
    ]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_packages_below_them(package: str) -> None:
    wrong = outside_the_arrows(imports(package))
    assert not wrong, "\n".join(wrong)


def test_an_import_of_a_package_above_is_found() -> None:
    assert outside_the_arrows([Import("kv", "kv/x.py:1", "paceline.engine.engine", False)])
    assert outside_the_arrows([Import("kv", "kv/x.py:1", "paceline.kernels.linear", False)])
    assert not outside_the_arrows([Import("kv", "kv/x.py:1", "paceline.kernels.formats.layout", False)])


def missing_dependencies(found: Iterable[Import]) -> list[str]:
    def is_allowed(one: Import) -> bool:
        if one.root == "paceline" or one.root in sys.stdlib_module_names:
            return True
        if one.package in PURE:
            return False
        if one.root == "triton" and one.where.startswith(GPU[0]):
            return True
        return one.root in (WHEN_NEEDED if one.deferred or one.where.startswith(ON_DEMAND) else AT_IMPORT)

    return [str(one) for one in found if not is_allowed(one)]


@pytest.mark.parametrize("package", BASE)
def test_base_packages_import_base_dependencies_only(package: str) -> None:
    wrong = missing_dependencies(imports(package))
    assert not wrong, "\n".join(wrong)


def test_an_import_beyond_the_base_dependencies_is_found() -> None:
    assert missing_dependencies([Import("core", "core/x.py:1", "torch", True)])
    assert missing_dependencies([Import("engine", "engine/x.py:1", "jinja2", False)])
    assert missing_dependencies([Import("engine", "engine/x.py:1", "zmq", True)])
    assert not missing_dependencies([Import("engine", "engine/x.py:1", "jinja2", True)])


def early_gpu_imports(found: Iterable[Import]) -> list[str]:
    return [
        str(one)
        for one in found
        if _path(one.module).startswith((*GPU, *ON_DEMAND)) and not one.deferred and not one.where.startswith(GPU)
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
    for one in found:
        if one.root == "paceline" and one.module != one.importer:
            graph.setdefault(one.importer, set()).add(one.module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        modules: list[str] = error.args[1]
        return modules
    return None


def test_imports_at_module_level_and_for_types_have_no_cycle() -> None:
    found = cycle(one for one in all_imports() if not one.in_function)
    assert found is None, " <- ".join(found or ())


@pytest.mark.parametrize("package", [*MAY_IMPORT, *sorted(APPLICATIONS)])
def test_imports_inside_functions_close_no_cycle_within_a_package(package: str) -> None:
    inner = (one for one in imports(package) if _within(one.module, f"paceline.{package}"))
    found = cycle(inner)
    assert found is None, " <- ".join(found or ())


def test_a_cycle_is_found() -> None:
    there = Import("kv", "kv/a.py:1", "paceline.kv.b", False)
    back = Import("kv", "kv/b.py:1", "paceline.kv.a", True, True)
    assert cycle([there, back]) is not None
    assert cycle([there, Import("kv", "kv/b.py:1", "paceline.kv.c", False)]) is None


# ---------------------------------------------------------------- folders


def crowded(counts: Mapping[str, int]) -> list[str]:
    return [f"{folder}: {count} modules" for folder, count in counts.items() if count > MAX_MODULES]


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
        one.name
        for one in classes
        if {"observe", "collect"} <= {item.name for item in one.body if isinstance(item, ast.FunctionDef)}
    }
    return names | {one.name for one in classes if any(_last_name(base) in names for base in one.bases)}


def type_tests(tree: ast.AST, names: set[str], file: str) -> list[str]:
    """Calls of `isinstance` with one of `names`, `match` patterns of one, and `getattr` of a proposer."""
    found = []
    for node in ast.walk(tree):
        tested: list[ast.expr] = []
        if isinstance(node, ast.MatchClass):
            tested = [node.cls]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2:
            if node.func.id in ("isinstance", "issubclass"):
                tested = [one for one in ast.walk(node.args[1]) if isinstance(one, ast.Name | ast.Attribute)]
            elif node.func.id in ("getattr", "hasattr") and _last_name(node.args[0]) == "proposer":
                found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
        if any(_last_name(one) in names for one in tested):
            found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    return found


def test_types_of_proposers_are_tested_only_among_proposers() -> None:
    home = SOURCE / "speculation" / "proposers"
    names = proposer_classes(
        tree_of(path) for path in sources() if path.parent == home or path.parent.name == "draft_pool"
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
        modules_of("server", "planning", "endpoints", "runtime/gateway_client"),
        blocked={"torch", "triton", "safetensors"},
    )


def test_a_blocked_import_fails() -> None:
    with pytest.raises(AssertionError, match="blocked: torch"):
        import_all(["paceline.engine.engine"], blocked={"torch"})
    with pytest.raises(AssertionError, match="blocked: fastapi"):
        import_all(["paceline.gateway.http.app"], blocked=(), allowed=AT_IMPORT)
