"""`paceline api-keys`: a key is printed once, and the file stores its hash."""

from pathlib import Path

from typer.testing import CliRunner, Result

from paceline.cli.commands import cli
from paceline.gateway.auth.api_keys import KeyFile, KeyLimits


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, ["api-keys", *arguments], env=environment)


def test_add_list_revoke(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = run(
        *("add", "ann", "--file", str(path), "--scope", "generate", "--scope", "admin", "--strict", "--learning"),
        *("--requests-per-minute", "10", "--tokens-per-minute", "5000", "--max-concurrent", "4"),
    )
    assert made.exit_code == 0
    text = made.stdout.strip()
    (key,) = KeyFile(path).read()
    assert key.matches(text)
    assert (key.scopes, key.limits, key.strict) == (("generate", "admin"), KeyLimits(10, 5000, 4), True)
    assert key.learning
    assert run("add", "ben", PACELINE_API_KEYS=str(path)).exit_code == 0
    assert KeyFile(path).read()[1].scopes == ("generate",)
    assert not KeyFile(path).read()[1].learning
    listed = run("list", "--file", str(path)).stdout
    words = listed.split()  # a narrow terminal breaks the lines of a cell
    for word in (
        "generate",
        "admin",
        "(strict)",
        "(learning)",
        "10",
        "requests/min,",
        "5000",
        "tokens/min,",
        "4",
        "concurrent",
    ):
        assert word in words
    assert text not in listed
    assert key.digest not in listed
    assert run("revoke", "ann", "--file", str(path)).exit_code == 0
    assert not KeyFile(path).read()[0].matches(text)


def test_errors_are_one_line_with_status_2(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.json")
    for arguments, message in (
        (("list",), "paceline api-keys add"),
        (("add", "ann", "--scope", "root"), "unknown scope 'root'"),
        (("add", "two words"), "1 to 64 letters"),
    ):
        result = run(*arguments, "--file", path)
        assert result.exit_code == 2
        assert message in result.stderr
    assert not Path(path).exists()
    run("add", "ann", "--file", path)
    assert "did you mean 'ann'?" in run("revoke", "anne", "--file", path).stderr
