"""Writes the module tables of docs/architecture.md from the docstrings of packages and modules.

python docs/module_tables.py            # write
python docs/module_tables.py --check    # exit with status 1 if the page is not current
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "paceline"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: begin (docs/module_tables.py writes this) -->", "<!-- modules: end -->"
ORDER = (
    "core", "telemetry", "model_files", "requests", "policy", "planning", "kernels", "kv", "models", "speculation",
    "engine", "wire", "transfer", "drafting", "targets", "worker", "gateway", "deploy", "tools", "vllm", "cli",
)  # fmt: skip


def summary(path: Path) -> str:
    """The first sentence of the docstring of a module, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.?!]) (?=[A-Z`])", paragraph)[0]
    return sentence.rstrip(".").replace("|", "\\|")


def rows(folder: Path) -> Iterator[str]:
    """One row a module of `folder`, then those of its sub-packages."""
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"| `{path.relative_to(SOURCE).as_posix()}` | {summary(path)} |"
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file()):
        yield f"| **{inner.relative_to(SOURCE).as_posix()}/** | **{summary(inner / '__init__.py')}** |"
        yield from rows(inner)


def tables() -> str:
    names = sorted((path.parent.name for path in SOURCE.glob("*/__init__.py")), key=ORDER.index)
    parts = []
    for name in names:
        head = f"### {name}\n\n{summary(SOURCE / name / '__init__.py')}.\n\n| module | contents |\n|---|---|"
        parts.append("\n".join([head, *rows(SOURCE / name)]))
    return "\n\n".join(parts)


def page(text: str) -> str:
    """`text` with current tables between the two marks."""
    before, found, rest = text.partition(BEGIN)
    _, also, after = rest.partition(END)
    if not (found and also):
        raise SystemExit(f"{PAGE} has no marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def main() -> None:
    text = PAGE.read_text("utf-8")
    current = page(text)
    if "--check" in sys.argv:
        sys.exit(
            0 if text == current else f"{PAGE.relative_to(ROOT)} is not current: run `python docs/module_tables.py`"
        )
    if text != current:
        PAGE.write_text(current, "utf-8")


if __name__ == "__main__":
    main()
