import json
import sys
from pathlib import Path

import pytest

from paceline.cli.options import check_folders, check_plots, write_json
from paceline.core.errors import InvalidRequest, MissingDependency


def test_a_file_in_a_missing_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    check_folders(tmp_path / "a.json", None)
    with pytest.raises(InvalidRequest, match=r"cannot write .*b\.json: there is no folder .*missing"):
        check_folders(None, tmp_path / "a.json", tmp_path / "missing" / "b.json")


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    check_plots(None, None)
    with pytest.raises(MissingDependency, match=r"paceline\[bench\]"):
        check_plots(None, Path("a.png"))


def test_json_is_indented_and_ends_with_a_newline(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"speedup": 2.0})
    assert file.read_text("utf-8") == '{\n  "speedup": 2.0\n}\n'
    assert json.loads(file.read_text("utf-8")) == {"speedup": 2.0}
