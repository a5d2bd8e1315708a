import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.commands import cli


def test_bench_profiles_both_ways_of_decoding(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    prompts, figures, picture = tmp_path / "p.jsonl", tmp_path / "f.json", tmp_path / "p.png"
    prompts.write_text('{"prompt": "Repeat exactly: a b c d e f g h a b c d e f g h"}\n')
    small = ("--kv-tokens", "1024", "--max-model-len", "512", "--max-num-seqs", "2", "--tokens", "8")
    arguments = ("bench", str(prompts), "--profile", str(picture), "--json", str(figures), *small)
    result = CliRunner().invoke(cli, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "Where a round's time goes" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    plain, speculative = json.loads(figures.read_text("utf-8"))["profiles"]
    assert (plain["name"], speculative["name"]) == ("plain", "speculative")
    # The first token comes with the prompt, and a prompt's pass is no round. The warm-up is not in here either.
    assert plain["rounds"] == 7
    assert 1 <= speculative["rounds"] <= 7
    for one in (plain, speculative):
        parts = one["parts"]
        assert sum(part["seconds"] for part in parts.values()) == pytest.approx(one["seconds"]["mean"])
        assert min(part["seconds"] for part in parts.values()) >= 0.0
        assert one["bytes_read"] > 50e6  # the embedded model's weights
        assert one["floor_seconds"] > 0.0
    assert plain["parts"]["draft"]["seconds"] < 0.1 * plain["seconds"]["mean"]
