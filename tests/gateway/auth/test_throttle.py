from pathlib import Path

import pytest

from paceline.core.clock import VirtualClock
from paceline.gateway.api.errors import RateLimited, Unauthorised
from paceline.gateway.auth.access import Access
from paceline.gateway.auth.api_keys import KeyFile
from paceline.gateway.auth.rate_limit import MAX_ADDRESSES, WRONG_KEYS_PER_MINUTE, WrongKeys

CHAT = "/v1/chat/completions"


def test_wrong_keys_of_an_address_are_throttled(tmp_path: Path) -> None:
    clock, file = VirtualClock(), KeyFile(tmp_path / "keys.json")
    key = file.add("ann")
    access = Access(file, clock.now, admin_key="open-sesame")
    for i in range(WRONG_KEYS_PER_MINUTE):
        with pytest.raises(Unauthorised):
            access.authenticate(CHAT, f"Bearer wrong-{i}", "10.0.0.1")
    with pytest.raises(RateLimited, match="wrong keys") as caught:
        access.authenticate("/admin/flags", "Bearer open-sesame", "10.0.0.1")
    assert caught.value.retry_after == 2
    assert access.authenticate(CHAT, f"Bearer {key}", "10.0.0.1").name == "ann"
    assert access.authenticate("/admin/flags", "Bearer open-sesame", "10.0.0.2").name == "admin"
    clock.advance(2.0)
    assert access.authenticate("/admin/flags", "Bearer open-sesame", "10.0.0.1").name == "admin"


def test_addresses_are_forgotten() -> None:
    wrong = WrongKeys(VirtualClock().now, per_minute=1)
    wrong.record("first")
    assert wrong.wait_seconds("first") > 0
    for i in range(MAX_ADDRESSES):
        wrong.record(f"host-{i}")
    assert wrong.wait_seconds("first") == 0
