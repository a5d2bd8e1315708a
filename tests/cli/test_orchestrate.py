"""`paceline orchestrate` over one real server, which is target and draft."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from paceline.cli.commands import cli
from paceline.tools.orchestrate import orchestrator
from tests.gateway.process import server_process

PROMPT = "The capital of France is"
QUESTION = "Name three colours."


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_process(draft="none") as process:
        yield process.url


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no draft late."""
    monkeypatch.setattr(orchestrator, "DRAFT_TIMEOUT", 60.0)


def run(url: str, *arguments: str, text: str | None = None) -> Result:
    options = ("--draft", url, "--target", f"{url}/v1", "--max-tokens", "16", "--depth", "fixed", "--max-depth", "4")
    return CliRunner().invoke(cli, ["orchestrate", *options, *arguments], input=text, env={"COLUMNS": "200"})


def completion(url: str) -> str:
    """The text of the target alone."""
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    return str(httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])


def chat(url: str, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["message"]["content"])


def test_standard_output_is_the_text_of_the_target_alone(url: str) -> None:
    expected = completion(url)
    result = run(url, PROMPT)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected + "\n"
    assert "tokens in" in result.stderr
    assert "per round" in result.stderr
    assert run(url, "-", text=PROMPT).stdout == expected + "\n"


def test_a_file_of_questions_is_answered_in_order_as_json(url: str, tmp_path: Path) -> None:
    questions, expected = [QUESTION, "Say hi."], [chat(url, QUESTION), chat(url, "Say hi.")]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in questions))
    result = run(url, "--prompts", str(file), "--chat", "--concurrency", "2", "--json")
    assert result.exit_code == 0, result.output
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == questions
    assert [answer["text"] for answer in answers] == expected
    assert all(answer["accepted"] > 0 for answer in answers)  # the draft is the target


def test_a_server_that_does_not_answer_is_one_line(url: str) -> None:
    result = CliRunner().invoke(cli, ["orchestrate", PROMPT, "--draft", "http://127.0.0.1:9", "--target", url])
    assert result.exit_code == 2
    assert "http://127.0.0.1:9" in " ".join(result.stderr.split())
    assert result.stdout == ""
