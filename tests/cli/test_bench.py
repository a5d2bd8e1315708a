"""`paceline bench` with the embedded model."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.commands import cli

SMALL = ("--kv-tokens", "2048", "--max-model-len", "512", "--max-num-seqs", "8")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, env={"COLUMNS": "200"})


def test_bench_with_the_embedded_model(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "Repeat exactly: a b c d e f g h a b c d e f g h", "category": "copy"}\n'
        '{"turns": ["Say hi.", "Again."], "category": "chat"}\n'
    )
    figures = tmp_path / "figures.json"
    options = ("--tokens", "12", "--concurrency", "2", "--price", "3.6", "--json", str(figures))
    result = run("bench", str(prompts), *options, *SMALL)
    assert result.exit_code == 0, result.output
    assert "speculative: all 3 answers are identical to plain." in result.stdout
    assert result.stdout.endswith(f"wrote {figures}\n")
    plain, speculative = json.loads(figures.read_text())["contenders"]
    assert plain["drafted"] == 0
    assert plain["tokens"] == speculative["tokens"] > 0
    assert set(plain["by_category"]) == {"copy", "chat"}
    assert "dollars per million tokens" in result.stdout
    assert plain["dollars_per_million_tokens"] == pytest.approx(1000.0 / plain["tokens_per_second"])


def test_invalid_files_are_reported_before_loading(tmp_path: Path) -> None:
    result = run("bench", str(tmp_path / "none.jsonl"))
    assert result.exit_code == 2
    assert "cannot read the prompts" in result.stderr
    result = run("bench", "--json", str(tmp_path / "none" / "figures.json"))
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


def test_profiles_of_plain_and_speculative(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    prompts, figures, picture = tmp_path / "p.jsonl", tmp_path / "f.json", tmp_path / "p.png"
    prompts.write_text('{"prompt": "Repeat exactly: a b c d e f g h a b c d e f g h"}\n')
    small = ("--kv-tokens", "1024", "--max-model-len", "512", "--max-num-seqs", "2", "--tokens", "8")
    arguments = ("bench", str(prompts), "--profile", str(picture), "--json", str(figures), *small)
    result = CliRunner().invoke(cli, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "Time of each part of a round" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.stdout.endswith(f"wrote {figures}\nwrote {picture}\n")
    plain, speculative = json.loads(figures.read_text("utf-8"))["profiles"]
    assert (plain["name"], speculative["name"]) == ("plain", "speculative")
    # The first token belongs to the prefill, which is not a round; it is one if all other tokens of the prompt are cached. The
    # warm-up is excluded.
    assert plain["rounds"] == 7
    assert 1 <= speculative["rounds"] <= 8
    for one in (plain, speculative):
        parts = one["parts"]
        assert sum(part["seconds"] for part in parts.values()) == pytest.approx(one["seconds"]["mean"])
        assert min(part["seconds"] for part in parts.values()) >= 0.0
        assert one["bytes_read"] > 50e6  # the embedded model's weights
        assert one["floor_seconds"] > 0.0
