"""What each check of each client found, kept in build/clients/matrix.json. `python -m tests.clients.matrix` writes the table of
docs/clients.md from it, after `make test-clients` with MODELS."""

import json
import re
from pathlib import Path

from tests.clients.environments import FOLDER, ROOT

FILE = FOLDER / "matrix.json"
PAGE = ROOT / "docs" / "clients.md"
MARKS = re.compile(r"(<!-- clients \(tests/clients/matrix\.py writes this\) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
PROTOCOL, QWEN = "protocol", "qwen"
"""The models: the embedded or the scripted model, and Qwen2.5-Coder-1.5B."""


def record(client: str, model: str, found: dict[str, str]) -> None:
    """Keeps the errors by check."""
    known = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    checks = known.setdefault(client, {})
    for name, error in found.items():
        checks.setdefault(name, {})[model] = error
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(known, indent=1), "utf-8")


def table(known: dict[str, dict[str, dict[str, str]]]) -> str:
    lines = ["| client | what the test does | without wits | Qwen2.5-Coder-1.5B |", "|---|---|---|---|"]
    for client, checks in known.items():
        for name, by_model in checks.items():
            cells = (_cell(by_model.get(model)) for model in (PROTOCOL, QWEN))
            lines.append(f"| {client} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(error: str | None) -> str:
    if error is None:
        return "not run"
    text = error.replace("|", "\\|").replace("\n", " ")
    return f"no: {text.removeprefix('ModelFault: ')}" if error else "yes"


def main() -> None:
    text, known = PAGE.read_text("utf-8"), json.loads(FILE.read_text("utf-8"))
    Path(PAGE).write_text(MARKS.sub(lambda match: f"{match[1]}{table(known)}{match[2]}", text), "utf-8")


if __name__ == "__main__":
    main()
