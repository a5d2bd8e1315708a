from pathlib import Path

import pytest

from paceline.core.errors import InvalidConfig
from paceline.tools.learn.versions import Activity, Lineage, TrialResult, VersionFolder


def lineage(version: int, parent: int = 0) -> Lineage:
    offline = TrialResult(True, 0.1, "better")
    return Lineage(version, parent, "2026-01-01T00:00:00+00:00", 5, 100, 3, 1.0, 0.5, 0.6, 2.0, 2.2, offline=offline)


@pytest.fixture
def folder(tmp_path: Path) -> VersionFolder:
    (tmp_path / "base").mkdir()
    folder = VersionFolder(tmp_path / "out")
    folder.create(tmp_path / "base", "http://server")
    return folder


def add(folder: VersionFolder, version: int, status: str, parent: int = 0) -> None:
    with folder.new_version(version) as part:
        (part / "model.safetensors").write_bytes(b"")
        folder.add(lineage(version, parent))
    folder.change(version, status=status)


def test_a_new_folder_starts_with_the_given_draft(folder: VersionFolder, tmp_path: Path) -> None:
    assert (folder.current(), folder.next_version()) == (0, 1)
    assert folder.draft(0) == tmp_path / "base"
    assert folder.find(str(tmp_path / "base")) == 0


def test_the_newest_kept_version_is_current(folder: VersionFolder) -> None:
    add(folder, 1, "kept")
    add(folder, 2, "refused", 1)
    assert (folder.current(), folder.next_version()) == (1, 3)
    assert folder.draft(1).name == "0001"
    assert folder.find(str(folder.draft(1))) == 1
    assert folder.find("/nowhere") is None
    assert folder.lineages()[0] == Lineage(**{**_fields(lineage(1)), "status": "kept"})


def _fields(one: Lineage) -> dict[str, object]:
    return {name: getattr(one, name) for name in Lineage.__dataclass_fields__}


def test_an_interrupted_version_leaves_nothing(folder: VersionFolder, tmp_path: Path) -> None:
    with folder.new_version(1) as part:
        (part / "model.safetensors").write_bytes(b"half")  # and no `add`
    assert list((folder.path / "versions").iterdir()) == []
    (folder.path / "versions" / "0001.part").mkdir()  # of a killed learner
    folder.create(tmp_path / "base", "http://server")
    assert list((folder.path / "versions").iterdir()) == []


def test_rollback_refuses_the_current_version(folder: VersionFolder) -> None:
    add(folder, 1, "kept")
    add(folder, 2, "kept", 1)
    assert folder.roll_back() == (2, 1)
    assert folder.lineages()[1].note == "rolled back by a command"
    assert folder.roll_back() == (1, 0)
    with pytest.raises(InvalidConfig, match="nothing to roll back"):
        folder.roll_back()


def test_pause_survives_a_restart(folder: VersionFolder, tmp_path: Path) -> None:
    folder.pause(True)
    folder.create(tmp_path / "base", "http://other")
    assert folder.state().is_paused
    assert folder.state().server == "http://other"
    folder.pause(False)
    assert not folder.state().is_paused


def test_another_draft_needs_another_folder(folder: VersionFolder, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(InvalidConfig, match="give another folder"):
        folder.create(tmp_path / "other", "http://server")


def test_a_folder_without_a_learner_is_an_error(tmp_path: Path) -> None:
    for call in (VersionFolder(tmp_path / "none").state, lambda: VersionFolder(tmp_path / "none").pause(True)):
        with pytest.raises(
            InvalidConfig, match=r"not the folder of a learner \(No such file or directory\): give the folder"
        ):
            call()


def test_activity(folder: VersionFolder) -> None:
    assert folder.activity() is None
    folder.write_activity(Activity(1, "now", "waiting", 2, 3, 4))
    assert folder.activity() == Activity(1, "now", "waiting", 2, 3, 4)
