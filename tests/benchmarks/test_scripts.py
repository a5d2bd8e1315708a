"""Every script of benchmarks/ imports, and answers --help."""

import importlib
import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("benchmarks/**/*.py"))
NEEDS = {"logits": "transformers", "serve_load": "aiohttp", "serve_compare": "aiohttp"}
"""Packages that only a script needs."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_imports_and_explains_itself(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / script
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(path.parent))
    if path.stem in NEEDS and importlib.util.find_spec(NEEDS[path.stem]) is None:
        pytest.skip(f"{NEEDS[path.stem]} is not installed")
    before = set(sys.modules)
    if "__main__" not in path.read_text("utf-8"):
        importlib.import_module(path.stem)
    else:
        monkeypatch.setattr("sys.argv", [path.name, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        assert not ended.value.code
        assert "usage:" in capsys.readouterr().out
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == path.parent:
            del sys.modules[name]
