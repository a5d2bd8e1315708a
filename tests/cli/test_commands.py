import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import generate
from paceline.cli.application import COMMANDS
from paceline.cli.commands import cli
from paceline.cli.serve import banner
from paceline.core.config import EngineConfig
from paceline.deploy.serving import ServerReady
from paceline.gateway.config.config import SETTINGS, ServerConfig
from tests.cli.fakes import ScriptedLLM

SMALL = ("--kv-tokens", "2048", "--max-model-len", "512", "--max-num-seqs", "8")


def run(*arguments: str, stdin: str | None = None, **environment: str) -> Result:
    return CliRunner().invoke(cli, arguments, input=stdin, env={"COLUMNS": "200", **environment})


def test_help_lists_the_commands_and_every_option_of_serve() -> None:
    result = run("--help")
    assert all(name in result.stdout for name in ("serve", "chat", "generate", "bench", "doctor"))
    help_text = run("serve", "--help").stdout
    assert all(setting.option in help_text for setting in SETTINGS.values())
    assert "support-chat" in run("bench", "--help").stdout


def test_version() -> None:
    assert run("--version").stdout.startswith("paceline ")


def test_error_is_one_line_with_status_2() -> None:
    result = run("generate", "hello", "--model", "/nowhere/model")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.strip().splitlines()[-1].startswith("error: no model at '/nowhere/model'")
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback() -> None:
    result = run("--debug", "generate", "hello", "--model", "/nowhere/model")
    assert type(result.exception).__name__ == "UnsupportedModel"


def test_invalid_value_error_contains_the_option() -> None:
    result = run("doctor", "--speculation-max-depth", "many")
    assert result.exit_code == 2
    assert "--speculation-max-depth" in result.stderr


@pytest.mark.parametrize("source", ["option", "file", "environment"])
def test_serve_reads_settings_from_every_source(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerConfig] = []

    def fake(config: ServerConfig, on_ready: Any) -> int:
        served.append(config)
        on_ready(ServerReady("http://127.0.0.1:9000", config.model_name))
        return 3

    monkeypatch.setattr("paceline.deploy.serving.serve", fake)
    if source == "option":
        result = run("serve", "--port", "9000", "--speculation-max-depth", "3", "--prefix-caching", "false")
    elif source == "environment":
        names = {"PACELINE_PORT": "9000", "PACELINE_SPECULATION_MAX_DEPTH": "3", "PACELINE_PREFIX_CACHING": "false"}
        result = run("serve", **names)
    else:
        file = tmp_path / "paceline.yaml"
        file.write_text("port: 9000\nprefix_caching: false\nspeculation:\n  max_depth: 3\n")
        result = run("serve", "--config", str(file))
    assert result.exit_code == 3, result.stderr
    (config,) = served
    assert (config.port, config.engine.speculation.max_depth, config.engine.prefix_caching) == (9000, 3, False)
    assert "curl http://127.0.0.1:9000/v1/chat/completions" in result.stdout
    assert 'base_url="http://127.0.0.1:9000/v1"' in result.stdout


def test_banner_commands_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    text = banner(ServerReady("http://127.0.0.1:8000", "my/[model]")).plain
    body = text.split("-d '")[1].split("'\n")[0]
    assert json.loads(body)["model"] == "my/[model]"
    compile(text.split("<<'EOF'\n")[1].split("EOF\n")[0], "banner", "exec")
    assert 'api_key="none"' in text
    assert "Authorization" not in text


def test_the_banner_names_the_dashboard_before_the_commands() -> None:
    text = banner(ServerReady("http://127.0.0.1:8000", "m")).plain
    assert 0 < text.index("Dashboard and playground: http://127.0.0.1:8000/") < text.index("curl")


def test_banner_includes_a_key_if_one_is_needed() -> None:
    text = banner(ServerReady("http://127.0.0.1:8000", "m", needs_key=True)).plain
    assert "api_key" not in text.replace("api-keys", "")
    assert '-H "Authorization: Bearer $OPENAI_API_KEY"' in text
    assert "export OPENAI_API_KEY=" in text
    compile(text.split("<<'EOF'\n")[1].split("EOF\n")[0], "banner", "exec")


def test_generate_reads_a_file_or_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM()

    @contextmanager
    def loaded(config: EngineConfig) -> Iterator[ScriptedLLM]:
        yield llm

    monkeypatch.setattr(generate, "loaded", loaded)
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    assert run("generate", "--file", str(file)).stdout == "one two three four five\n"
    run("generate", stdin="from a pipe")
    run("generate", "-", "--chat", stdin="a question")
    assert llm.prompts == ["from a file", "from a pipe", [{"role": "user", "content": "a question"}]]
    assert run("generate", "x", "--file", str(file)).exit_code == 2
    assert run("generate", "--file", str(tmp_path / "none")).exit_code == 2


def test_generate_json_with_the_embedded_model() -> None:
    result = run("generate", "One, two, three,", "-n", "2", "--json", "--max-tokens", "8", "--seed", "1", *SMALL)
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [completion["index"] for completion in answer["completions"]] == [0, 1]
    assert all(len(completion["token_ids"]) <= 8 for completion in answer["completions"])
    assert answer["completions"][0]["speculative_decoding"]["num_spec_tokens"] == 8


def test_missing_package_error_has_the_install_command() -> None:
    code = "import sys; sys.modules['typer'] = None; from paceline.cli.main import app; app()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("pip install 'paceline[server]'")
    assert "Traceback" not in result.stderr


def test_python_m_paceline_and_help_without_torch() -> None:
    code = "import sys, paceline.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    result = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.startswith("paceline ")


@pytest.mark.parametrize(
    ("group", "others"), [("learn", "paceline learn status"), ("audit", "paceline audit verify"), ("bench", "inflate")]
)
def test_the_help_of_a_default_command_names_the_others(group: str, others: str) -> None:
    for _ in range(2):  # the second does not repeat them
        result = CliRunner().invoke(cli, [group, "--help"], env={"COLUMNS": "200"}, prog_name="paceline")
        last = result.output[result.output.rindex("Other commands: ") :]
        assert others in last
        assert result.output.count("Other commands: ") == 1


@pytest.mark.parametrize("words", [(), ("serve",), ("plan",), ("rollout",), ("status",), ("draft", "swap"), ("audit",)])
def test_help_shows_no_type_for_flags_and_single_brackets(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*words, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--help" in result.output
    assert not [line for line in result.output.splitlines() if "<bool>" in line or "[[" in line or "BOOL" in line]


def answered(*words: str) -> subprocess.CompletedProcess[str]:
    """`paceline` in a process of its own, which says on its last line whether it imported torch."""
    code = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules))\nfrom paceline.cli import app\napp()"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("word", "advice"), [("srve", "did you mean `paceline serve`?"), ("qqq", "`paceline --help`")])
def test_an_unknown_command_is_answered_with_the_nearest(word: str, advice: str) -> None:
    done = answered(word)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert f"there is no command {word!r}: {advice}" in done.stderr


@pytest.mark.parametrize("words", [("serve", "nowhere"), ("generate", "x", "--model", "nowhere")])
def test_a_wrong_name_is_refused_without_torch(words: tuple[str, ...]) -> None:
    done = answered(*words)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "no model at 'nowhere'" in done.stderr


def test_the_help_of_all_commands_needs_no_torch() -> None:
    done = answered("--help")
    assert done.stdout.endswith("False\n")
    assert all(name in done.stdout for name in COMMANDS)


def test_the_banner_of_a_model_without_a_template_has_no_chat_example() -> None:
    text = banner(ServerReady("http://127.0.0.1:8000", "tiny", has_template=False, window=8192, own_window=32768)).plain
    assert "/v1/chat/completions" not in text
    assert "chat.completions" not in text
    assert "continues texts" in text
    body = json.loads(text.split("-d '")[1].split("'\n")[0])
    assert body["prompt"]
    compile(text.split("<<'EOF'\n")[1].split("EOF\n")[0], "banner", "exec")


def test_the_banner_says_how_a_reduced_window_is_raised() -> None:
    ready = ServerReady("http://127.0.0.1:8000", "tiny", window=8192, own_window=32768)
    assert "Context: 8,192 of the model's 32,768 tokens; --max-model-len 32768 raises it." in banner(ready).plain
    assert "Context: 32,768 tokens." in banner(replace(ready, window=32768)).plain
