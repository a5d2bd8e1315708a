"""The bounds of stored responses: by key, in all, and by age."""

import json
from typing import Any

from paceline.gateway.api.responses_bodies import InputMessage
from paceline.gateway.responses.store import ResponseStore, StoredResponse, StoreLimits

TEXT = "x" * 1000


def stored(name: str, text: str = TEXT) -> StoredResponse:
    item = InputMessage(role="assistant", content=text)
    return StoredResponse({"id": name}, (item,), {f"msg_{name}": item})


def store(now: list[float], **limits: Any) -> ResponseStore:
    return ResponseStore(lambda: now[0], StoreLimits(**limits))


def test_a_key_sees_its_own_responses_alone() -> None:
    kept = store([0.0])
    kept.add("a", stored("1"))
    assert kept.get("a", "1") is not None
    assert kept.get("b", "1") is None
    assert kept.item("a", "msg_1") == InputMessage(role="assistant", content=TEXT)
    assert kept.item("b", "msg_1") is None
    assert not kept.delete("b", "1")
    assert kept.delete("a", "1")
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_the_oldest_responses_of_a_key_leave_first() -> None:
    kept = store([0.0], entries_per_key=2)
    kept.add("b", stored("0"))
    for name in ("1", "2", "3"):
        kept.add("a", stored(name))
    assert [kept.get("a", name) is not None for name in ("1", "2", "3")] == [False, True, True]
    assert kept.get("b", "0") is not None


def test_bytes_of_a_key_and_of_all_keys_are_bounded() -> None:
    size = stored("1").num_bytes
    assert size >= len(TEXT) + len(json.dumps({"id": "1"}))
    kept = store([0.0], bytes_per_key=2 * size, bytes_in_all=3 * size)
    for name in ("1", "2", "3"):
        kept.add("a", stored(name))
    assert (len(kept), kept.get("a", "1")) == (2, None)
    kept.add("a", stored("4", TEXT * 3))
    assert kept.get("a", "4") is None  # it is larger than all that a key may keep
    kept.add("b", stored("5"))
    kept.add("c", stored("6"))
    assert kept.get("a", "2") is None  # the oldest of all
    assert kept.num_bytes == 3 * size


def test_responses_are_forgotten_after_their_time() -> None:
    now = [0.0]
    kept = store(now, seconds=10.0)
    kept.add("a", stored("1"))
    now[0] = 9.0
    kept.add("a", stored("2"))
    now[0] = 11.0
    assert kept.get("a", "1") is None
    assert kept.item("a", "msg_1") is None
    assert kept.get("a", "2") is not None
    assert len(kept) == 1
