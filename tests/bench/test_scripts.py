"""Every script of benchmarks/ imports, and answers --help."""

import importlib
import importlib.util
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
NEEDS = {
    "gpu_transformers": "transformers",
    "logits": "transformers",
    "serve_load": "aiohttp",
    "serve_compare": "aiohttp",
}
"""Packages that only a script needs."""


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER.parent))


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_imports_and_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    if "__main__" not in (FOLDER / f"{name}.py").read_text("utf-8"):
        importlib.import_module(name)
        return
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert not ended.value.code
    assert "usage:" in capsys.readouterr().out
