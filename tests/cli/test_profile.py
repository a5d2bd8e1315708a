import logging
import re
from pathlib import Path

from typer.testing import CliRunner

from paceline.cli.commands import cli
from paceline.planning.profile import load_profile
from tests.engine.start.test_build import save_checkpoint

SMALL = ("--device", "cpu", "--max-num-seqs", "2", "--max-model-len", "128", "--kv-tokens", "512")


def test_a_profile_is_written_and_the_time_left_is_shown(tmp_path: Path) -> None:
    model, file = save_checkpoint(tmp_path / "target"), tmp_path / "worker.json"
    result = CliRunner().invoke(cli, ("profile", str(file), "--model", model, *SMALL), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert load_profile(str(file)).name == "worker"
    lines = [line for line in result.stderr.splitlines() if "measuring: " in line]
    assert len(lines) >= 4
    assert all(re.search(r"about \d+ (s|min) left$", line) for line in lines)
    assert "measuring: 1 sequence, " in result.stderr
    assert f"wrote {file} in " in result.stdout.replace("\n", "")
    assert logging.getLogger("paceline.engine.traffic").level == logging.NOTSET, "other commands warn of drift"
