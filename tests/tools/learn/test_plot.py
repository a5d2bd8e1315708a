from dataclasses import replace
from pathlib import Path

import pytest

from paceline.tools.learn.learner import plot_versions
from tests.tools.learn.test_versions import lineage


def test_the_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lineages = [replace(lineage(1), status="kept"), replace(lineage(2, 1), status="refused"), lineage(3, 1)]
    plot_versions(lineages, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 1000
