"""The plot of a training that is too short to score a draft."""

from pathlib import Path

import pytest

from paceline.tools.train.card import plot_curve


def test_a_curve_without_positions_is_plotted_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    point = {"tokens": 64, "alphas": [], "tokens_per_round": 0.0, "tree_tokens_per_round": 0.0}
    plot_curve([point], "medusa", tmp_path / "alpha.png")  # warnings are errors
    assert (tmp_path / "alpha.png").read_bytes().startswith(b"\x89PNG")
