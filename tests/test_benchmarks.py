"""Every script of benchmarks/ is named in the README of its folder, and every script that a page names exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
MAX_LINES = 500
NAMED = re.compile(r"(?<![\w/.-])(?:\./)?(benchmarks/[\w/.-]+\.(?:py|sh|json|md))|python3? -m (benchmarks\.[\w.]+\w)")


def imports_of(text: str) -> set[str]:
    """Last parts of the modules that a script imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.rpartition(".")[2] for name in found}


def unnamed(folder: Path) -> list[str]:
    """Scripts of a folder that its README does not name and that no named script imports."""
    page = (folder / "README.md").read_text("utf-8")
    scripts = {path.stem: path for path in folder.glob("*.py")}
    known = {stem for stem in scripts if re.search(rf"(?<!\w){stem}\.py\b|\bbenchmarks\.\w+\.{stem}\b", page)}
    waiting = list(known)
    while waiting:
        new = imports_of(scripts[waiting.pop()].read_text("utf-8")) & set(scripts) - known
        known |= new
        waiting += new
    return sorted(set(scripts) - known)


def missing(text: str, root: Path) -> Iterator[str]:
    """Paths and modules of benchmarks/ that a text names and that do not exist."""
    for path, module in NAMED.findall(text):
        named = path or module.replace(".", "/") + ".py"
        if not (root / named).exists():
            yield named


def pages() -> list[Path]:
    names = (
        "*.md",
        "docs/**/*.md",
        "docs/**/*.py",
        "benchmarks/**/*",
        "examples/*",
        "tests/**/*.py",
        "src/paceline/**/*",
    )
    kinds = {".md", ".py", ".sh", ".json", ".c", ".toml", ".yml"}
    found = [path for name in names for path in ROOT.glob(name) if path.suffix in kinds and path != Path(__file__)]
    return [*found, ROOT / "Makefile", ROOT / "mkdocs.yml", ROOT / "pyproject.toml"]


def test_every_script_is_named_in_the_readme_of_its_folder() -> None:
    folders = {path.parent for path in FOLDER.rglob("*.py")}
    assert len(folders) > 9
    assert FOLDER not in folders, "a script belongs to a folder"
    assert {folder.name: unnamed(folder) for folder in folders} == {folder.name: [] for folder in folders}
    index = (FOLDER / "README.md").read_text("utf-8")
    assert {folder.name for folder in folders} == set(re.findall(r"\]\((\w+)/README\.md\)", index))


def test_scripts_are_short_and_compile() -> None:
    for path in FOLDER.rglob("*.py"):
        text = path.read_text("utf-8")
        compile(text, str(path), "exec")
        assert len(text.splitlines()) <= MAX_LINES, path


def test_scripts_that_pages_name_exist() -> None:
    found = {page.relative_to(ROOT).as_posix(): [*missing(page.read_text("utf-8"), ROOT)] for page in pages()}
    assert {page: names for page, names in found.items() if names} == {}


def test_the_checks_find_planted_mistakes(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("    python benchmarks/x/named.py")
    (tmp_path / "named.py").write_text("from helper import value\n")
    (tmp_path / "helper.py").write_text("import second\n")
    (tmp_path / "second.py").write_text("")
    (tmp_path / "forgotten.py").write_text("import named\n")
    assert unnamed(tmp_path) == ["forgotten"]
    text = "`benchmarks/none.py` and `python -m benchmarks.no.module`, benchmarks/README.md, other/benchmarks/none.py"
    assert list(missing(text, ROOT)) == ["benchmarks/none.py", "benchmarks/no/module.py"]
