"""What each check of each client found, kept in build/clients/matrix.json.

`python -m tests.clients.matrix` writes the tables of docs/clients.md from it, after `make test-clients` with MODELS.
"""

import json
import re

from tests.clients.environments import FOLDER, ROOT

FILE = FOLDER / "matrix.json"
PAGE = ROOT / "docs" / "clients.md"
MARKS = re.compile(r"(<!-- (\w+) \(tests/clients/matrix\.py writes this\) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
LIBRARIES = {
    "openai": "openai 3.51.0",
    "anthropic": "anthropic 2.10.0",
    "litellm": "LiteLLM 1.106.2",
    "langchain": "langchain-openai 1.7.3",
    "llama-index": "LlamaIndex openai-like 0.8.1",
    "pydantic-ai": "pydantic-ai 2.68.0",
    "ollama": "ollama 0.6.3",
    "ai-sdk": "Vercel AI SDK 7.0.173, openai for Node 6.49.0",
}
AGENTS = {
    "aider": "aider 0.86.2",
    "mini-swe-agent": "mini-swe-agent 2.4.6",
    "codex": "Codex 0.169.0",
    "claude-code": "Claude Code 2.1.328",
}
"""The clients as docs/clients.md names them."""
PROTOCOL, QWEN = "protocol", "qwen"
"""The models: the embedded or the scripted model, and Qwen2.5-Coder-1.5B."""


def record(client: str, model: str, found: dict[str, str]) -> None:
    """Keeps the errors by check. They are empty for checks that passed."""
    known = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    checks = known.setdefault(client, {})
    for name, error in found.items():
        checks.setdefault(name, {})[model] = error
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(known, indent=1), "utf-8")


def table(clients: dict[str, str], known: dict[str, dict[str, dict[str, str]]]) -> str:
    lines = ["| client | what the test does | without wits | Qwen2.5-Coder-1.5B |", "|---|---|---|---|"]
    for client, shown in clients.items():
        for name, by_model in known.get(client, {}).items():
            cells = (_cell(by_model.get(model)) for model in (PROTOCOL, QWEN))
            lines.append(f"| {shown} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(error: str | None) -> str:
    if error is None:
        return "not run"
    text = error.replace("|", "\\|").replace("\n", " ")
    return f"no: {text.removeprefix('ModelFault: ')}" if error else "yes"


def main() -> None:
    known = json.loads(FILE.read_text("utf-8"))
    missing = [
        f"{client} with {model}"
        for client in (*LIBRARIES, *AGENTS)
        for model in (PROTOCOL, QWEN)
        if not any(model in by_model for by_model in known.get(client, {}).values())
    ]
    if missing:
        print(f"docs/clients.md stays as it is, as these did not run: {', '.join(missing)}")
        return
    tables = {"libraries": table(LIBRARIES, known), "agents": table(AGENTS, known)}
    text = PAGE.read_text("utf-8")
    PAGE.write_text(MARKS.sub(lambda match: f"{match[1]}{tables[match[2]]}{match[3]}", text), "utf-8")


if __name__ == "__main__":
    main()
