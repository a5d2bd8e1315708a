"""The flag store: validation, file and listeners."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import InvalidConfig, InvalidRequest
from paceline.core.request import SpeculationFlags
from paceline.gateway.config.flags import MAX_HISTORY, FlagsNotSaved, FlagStore


def no_draft_model(flags: SpeculationFlags) -> None:
    if flags.method == "draft_model":
        raise InvalidRequest("speculation method 'draft_model' is not loaded here", field="method")


def test_initial_flags_are_none() -> None:
    assert FlagStore().get() == SpeculationFlags(None, None, None)


def test_changes_accumulate_and_none_resets() -> None:
    store = FlagStore()
    assert store.update({"enabled": False}, "ann") == SpeculationFlags(enabled=False)
    assert store.update({"max_depth": 3, "method": "ngram"}, "ben") == SpeculationFlags(False, "ngram", 3)
    assert store.update({"enabled": None}, "ann") == store.get() == SpeculationFlags(None, "ngram", 3)


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"enabled": "no"}, "enabled", "enabled must be true, false or null, got 'no'"),
        ({"enabled": 1}, "enabled", "enabled must be true, false or null, got 1"),
        ({"method": 3}, "method", "method must be a string or null, got 3"),
        ({"max_depth": -1}, "max_depth", "max_depth must be an integer in [0, 32] or null, got -1"),
        ({"max_depth": 33}, "max_depth", "max_depth must be an integer in [0, 32] or null, got 33"),
        ({"max_depth": True}, "max_depth", "max_depth must be an integer in [0, 32] or null, got True"),
        ({"max_depth": 2.0}, "max_depth", "max_depth must be an integer in [0, 32] or null, got 2.0"),
        ({"maxdepth": 2}, "maxdepth", "unknown flag 'maxdepth'; did you mean 'max_depth'?"),
        ({"method": "draft_model"}, "method", "speculation method 'draft_model' is not loaded here"),
        ({"max_depth": 2, "enabled": 0}, "enabled", "enabled must be true, false or null, got 0"),
    ],
)
def test_a_bad_change_names_the_flag_and_changes_nothing(
    changes: dict[str, Any], field: str, message: str, tmp_path: Path
) -> None:
    store = FlagStore(tmp_path / "flags.json", no_draft_model)
    store.update({"max_depth": 5}, "ann")
    received: list[SpeculationFlags] = []
    store.subscribe(received.append)
    before = (tmp_path / "flags.json").read_bytes()
    with pytest.raises(InvalidRequest) as error:
        store.update(changes, "ben")
    assert (error.value.field, str(error.value)) == (field, message)
    assert store.get() == SpeculationFlags(max_depth=5)
    assert received == [SpeculationFlags(max_depth=5)]
    assert (tmp_path / "flags.json").read_bytes() == before


def test_a_listener_receives_the_flags_now_and_after_every_change() -> None:
    store = FlagStore()
    store.update({"max_depth": 1}, "ann")
    received: list[int | None] = []
    store.subscribe(lambda flags: received.append(flags.max_depth))
    store.update({"max_depth": 2}, "ann")
    store.update({"max_depth": None}, "ann")
    assert received == [1, 2, None]


# --- the file


def test_a_restart_restores_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "flags.json"
    first = FlagStore(path)
    first.update({"enabled": False}, "ann")
    first.update({"max_depth": 4}, "ben")
    second = FlagStore(str(path))
    assert second.get() == SpeculationFlags(enabled=False, max_depth=4)
    assert [(change.who, change.changes) for change in second.history] == [
        ("ann", {"enabled": False}),
        ("ben", {"max_depth": 4}),
    ]
    assert all(change.when.endswith("+00:00") for change in second.history)
    assert [file.name for file in tmp_path.iterdir()] == ["flags.json"]


def test_the_history_is_bounded(tmp_path: Path) -> None:
    store = FlagStore()
    for i in range(MAX_HISTORY + 5):
        store.update({"max_depth": i % 7}, str(i))
    assert [change.who for change in store.history] == [str(i) for i in range(5, MAX_HISTORY + 5)]


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        b"",
        b'{"flags": {}}',
        b'{"flags": {"enabled": "no"}, "history": []}',
        b'{"flags": {"colour": 1}, "history": []}',
    ],
)
def test_a_damaged_file_is_moved_and_the_next_start_works(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "flags.json"
    path.write_bytes(content)
    with pytest.raises(InvalidConfig, match="is damaged") as error:
        FlagStore(path)
    (moved,) = tmp_path.iterdir()
    assert moved.read_bytes() == content
    assert str(moved) in str(error.value)
    assert FlagStore(path).get() == SpeculationFlags()


def test_unsupported_flags_in_the_file_are_rejected_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "flags.json"
    FlagStore(path).update({"method": "draft_model"}, "ann")
    with pytest.raises(InvalidConfig, match=r"flags.json: .*not loaded here.* Correct or remove"):
        FlagStore(path, no_draft_model)
    assert json.loads(path.read_text())["flags"]["method"] == "draft_model"


def test_a_missing_folder_is_reported_at_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="does not exist"):
        FlagStore(tmp_path / "absent" / "flags.json")


def test_a_failed_write_leaves_the_flags_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    store = FlagStore(folder / "flags.json")
    folder.rmdir()
    with pytest.raises(FlagsNotSaved, match="did not change"):
        store.update({"enabled": False}, "ann")
    assert (store.get(), store.history) == (SpeculationFlags(), ())


def test_concurrent_changes_are_all_kept(tmp_path: Path) -> None:
    store = FlagStore(tmp_path / "flags.json")
    received: list[SpeculationFlags] = []
    store.subscribe(received.append)
    threads = [
        threading.Thread(target=lambda i=i: [store.update({"max_depth": i}, str(i)) for _ in range(5)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.history) == 20
    assert received[-1] == store.get() == FlagStore(tmp_path / "flags.json").get()
    assert [flags.max_depth for flags in received[1:]] == [change.changes["max_depth"] for change in store.history]
