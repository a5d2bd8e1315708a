from pathlib import Path

import pytest

from paceline.tools.plots.plots import plot_profiles
from paceline.tools.profile.measurement import PARTS, Profile, RoundTimes, profile


def times(draft: float, verify: float, sample: float, gap: float, bytes_read: int = 0) -> RoundTimes:
    return RoundTimes(draft, verify, sample, gap, draft + verify + sample + gap, bytes_read)


def made(name: str = "speculative") -> Profile:
    found = profile(name, [times(1, 6, 2, 1, 100), times(1, 2, 0, 1, 300), times(1, 4, 1, 1, 200)], bandwidth=50.0)
    assert found is not None
    return found


def test_parts_are_means_and_add_up() -> None:
    one = made()
    assert (one.num_rounds, one.seconds, one.median_seconds) == (3, 7.0, 7.0)
    assert [share.part for share in one.parts] == list(PARTS)
    assert [share.seconds for share in one.parts] == [1.0, 4.0, 1.0, 1.0]
    assert sum(share.fraction for share in one.parts) == pytest.approx(1.0)


def test_floor_is_bytes_over_bandwidth() -> None:
    one = made()
    assert one.floor_seconds == 4.0  # 200 bytes at 50 a second
    assert one.floor_fraction == pytest.approx(4 / 7)
    assert one.to_json()["floor_fraction"] == one.floor_fraction
    assert one.to_json()["parts"]["gap"] == {"seconds": 1.0, "share": pytest.approx(1 / 7)}


def test_no_rounds_no_profile() -> None:
    assert profile("plain", [], 1.0) is None


def test_plot_of_profiles(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_profiles([made("plain"), made()], "test", tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
