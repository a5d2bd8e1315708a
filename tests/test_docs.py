"""The documentation names files, links, commands and versions that exist."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import paceline
from paceline.core.version import VERSION
from paceline.gateway.auth.api_keys import KeyLimits
from paceline.gateway.config.config import SETTINGS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "paceline"
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md"), *ROOT.glob("examples/*.md")]
)
NAMING = ["docs/architecture.md", "docs/request_life.md", "docs/add_a_proposer.md", "CONTRIBUTING.md"]
"""Pages whose class names must exist in the source."""
TEST = r"`((?:[\w/]+/)?test_\w+\.py|…)?(?:::(test_\w+))?`"
"""A test between backticks: its file and its name, either of which may be missing."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", text_without_code(page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for address in re.findall(r"\]\(([^)\s]+)\)", text_without_code(text)):
        if "://" in address:
            continue
        path, _, anchor = address.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{name(page)}: {address}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{name(page)}: {address}: no such heading"


def unknown_paths(text: str) -> Iterator[str]:
    """Paths of source files between backticks that exist neither in the repository nor in the package."""
    for path in re.findall(r"`([\w./-]+/[\w-]+\.(?:py|md|yaml|c|sh))`", text):
        if not any((base / path).exists() for base in (ROOT, SOURCE, ROOT / "docs", ROOT / "tests")):
            yield path


def unknown_classes(text: str, source: str) -> set[str]:
    """CamelCase words between backticks that the source does not have."""
    words = set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z]\w*)+\b", " ".join(re.findall(r"`[^`\n]+`", text))))
    return {word for word in words if not re.search(rf"\b{word}\b", source)}


def unknown_tests(text: str) -> Iterator[str]:
    """Tests between backticks that do not exist, and rows without one where the last column is `test`. `…::` and `::` repeat
    the file."""
    files: list[Path] = []
    is_in_table = False
    for line in text.splitlines():
        if not line.startswith("|"):
            is_in_table = False
            continue
        column = line.rstrip(" |").rpartition("|")[2].strip()
        if column == "test":
            is_in_table = True
            continue
        found = [pair for pair in re.findall(TEST, column) if any(pair)]
        if is_in_table and not found and set(column) != {"-"}:
            yield f"no test: {line}"
        for path, test in found:
            if path not in ("", "…"):
                files = [file for file in (ROOT / "tests").rglob("*.py") if file.as_posix().endswith(f"/{path}")]
            if not files or (test and not any(f"def {test}(" in file.read_text("utf-8") for file in files)):
                yield f"{path}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    wrong = [*broken_links(page, text), *(f"{name(page)}: {path}" for path in unknown_paths(text))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", NAMING)
def test_named_classes_exist(page: str) -> None:
    source = "\n".join(path.read_text("utf-8") for path in SOURCE.rglob("*.py"))
    unknown = unknown_classes((ROOT / page).read_text("utf-8"), source)
    assert not unknown, sorted(unknown)


def test_the_life_of_a_request_has_at_most_20_parts() -> None:
    text = (ROOT / "docs" / "request_life.md").read_text("utf-8")
    tables = "\n".join(re.findall(r"^\| \d+ \|.*$", text, re.MULTILINE))
    values = set(re.findall(r"^\| `(\w+)` ", text, re.MULTILINE))
    parts = set(re.findall(r"`([A-Z]\w+)`", tables)) - values - {"GraphExecutor"}  # it stands in for HostExecutor
    assert {"Gateway", "Engine", "Proposer"} <= parts
    assert len(parts) <= 20, sorted(parts)


def test_every_row_of_the_trust_report_names_a_test() -> None:
    text = (ROOT / "benchmarks" / "trust" / "README.md").read_text("utf-8")
    assert not list(unknown_tests(text))
    assert len(re.findall(TEST, text)) > 100


def test_every_limit_is_on_the_page_of_access() -> None:
    """With a test that exists."""
    text = (ROOT / "docs" / "access.md").read_text("utf-8")
    assert not list(unknown_tests(text))
    limits = [
        name
        for name in (*SETTINGS, *KeyLimits.__dataclass_fields__)
        if re.search(r"(^|[._])max_|_timeout$|_bytes$|_per_minute$|^kv_tokens$", name)
    ]
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    assert len(limits) > 20
    assert [name for name in limits if f"`{name}`" not in rows] == []


def test_the_checks_find_planted_mistakes() -> None:
    page = ROOT / "README.md"
    assert list(broken_links(page, "[a](docs/none.md) [b](docs/api.md#none) [c](docs/api.md) [d](https://x.y)")) == [
        "README.md: docs/none.md: no such file",
        "README.md: docs/api.md#none: no such heading",
    ]
    assert list(unknown_paths("`engine/engine.py` `engine/none.py` engine/other.py")) == ["engine/none.py"]
    rows = "| a | test |\n|---|---|\n| b | `test_docs.py::test_none` |\n| c | `::test_one_version` |\n| d | none |"
    assert list(unknown_tests(rows)) == ["test_docs.py::test_none", "no test: | d | none |"]
    assert unknown_classes("`EngineConfig` and `NoSuchThing`, PlainWord", "class EngineConfig:") == {"NoSuchThing"}


def module_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("module_tables", ROOT / "docs" / "module_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_module_tables_are_current() -> None:
    tables = module_tables()
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert tables.page(text) == text, "run `python docs/module_tables.py`"
    assert "| `engine/engine.py` | " in text


def test_every_module_has_a_docstring() -> None:
    tables = module_tables()
    without = [str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.py")) if not tables.summary(path)]
    assert not without, without


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    result = subprocess.run(
        # With --quiet, --strict would not count warnings.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "site" / "index.html").is_file()


def test_one_version() -> None:
    version = VERSION
    assert paceline.__version__ == version
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    pages = "\n".join(page.read_text("utf-8") for page in PAGES)
    named = set(re.findall(r"(?:^|`)make ([\w-]+)", pages, re.MULTILINE))
    assert {"serve", "test"} <= named
    assert named <= targets, named - targets


def test_the_readme_fits_on_a_screen_or_two() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 110


def test_benchmarks_and_examples_name_no_file_outside_the_repository() -> None:
    scripts = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("benchmarks/**/*.sh"), *ROOT.glob("examples/*.py")]
    assert len(scripts) > 50
    assert [name(path) for path in scripts if "../" in path.read_text("utf-8")] == []
