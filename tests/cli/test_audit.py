"""`paceline audit verify`: status 0 for a trail that is whole, 1 for one that is not."""

from pathlib import Path

from typer.testing import CliRunner, Result

from paceline.cli.commands import cli
from paceline.server.trail import Trail


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["audit", "verify", *arguments], env={"COLUMNS": "200"})


def test_verify(tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    with Trail(path) as trail:
        trail.append("started", request="a")
        first = trail.head
        trail.append("finished", request="a")
        trail.append("started", request="b")
        head = trail.head
    whole = verify(str(path))
    assert whole.exit_code == 0
    assert f"3 records, none changed; the head is {head}" in whole.stdout
    assert "cut short: b" in whole.stdout
    assert verify(str(path), "--head", first).exit_code == 0
    assert verify(str(path), "--head", "0" * 64).exit_code == 1
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"c"', 1))
    broken = verify(str(path))
    assert broken.exit_code == 1
    assert "line 1: it was changed" in broken.stderr
    assert verify(str(tmp_path / "absent")).exit_code == 2
