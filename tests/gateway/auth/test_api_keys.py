"""The key file: it holds hashes only, changes are atomic, and an invalid file is rejected."""

import json
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import InvalidConfig
from paceline.gateway.auth.api_keys import ApiKey, KeyFile, KeyLimits, KeyShare, key_id


def test_the_file_holds_only_a_hash(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    text = file.add("ann", scopes=("generate", "admin"), limits=KeyLimits(5, 600, 2), strict=True)
    secret = text.split("-", 2)[2]
    assert len(secret) >= 43  # 256 bits
    assert secret not in file.path.read_text()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    (key,) = file.read()
    assert (key.name, key.id, key.scopes, key.limits) == (
        "ann",
        key_id(text),
        ("generate", "admin"),
        KeyLimits(5, 600, 2),
    )
    assert key.strict
    assert key.matches(text)
    assert not key.matches(text[:-1])
    assert not key.matches("")
    assert key.digest not in repr(key)
    assert key.cache_salt not in repr(key)


def test_two_keys_have_different_salts_and_secrets(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    one, other = file.add("ann"), file.add("ben")
    first, second = file.read()
    assert one != other
    assert not first.matches(other)
    assert len({first.salt, second.salt, first.cache_salt, second.cache_salt}) == 4
    same = [ApiKey.from_text("the same text", name) for name in ("x", "y")]
    assert same[0].digest != same[1].digest


def test_a_revoked_key_is_invalid_and_its_name_is_free(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    text = file.add("ann")
    with pytest.raises(InvalidConfig, match="has a key 'ann'"):
        file.add("ann")
    file.revoke("ann")
    assert not file.read()[0].matches(text)
    with pytest.raises(InvalidConfig, match="has no valid key 'ann'"):
        file.revoke("ann")
    again = file.add("ann")
    assert [key.matches(again) for key in file.read()] == [False, True]


def test_scopes() -> None:
    assert ApiKey("a").has_scope("generate")
    assert not ApiKey("a").has_scope("metrics")
    assert not ApiKey("a").has_scope("admin")
    admin = ApiKey("a", scopes=("admin",))
    assert (admin.has_scope("admin"), admin.has_scope("metrics"), admin.has_scope("generate")) == (True, True, False)


def test_cache_salts_of_different_keys_differ() -> None:
    one, other, anonymous = ApiKey("a"), ApiKey("b"), ApiKey("c", cache_salt="")
    salts = {key.salt_cache(salt) for key in (one, other) for salt in ("", "x", one.cache_salt, other.salt_cache("x"))}
    assert len(salts) == 8
    assert one.salt_cache("x") == one.salt_cache("x")
    assert (anonymous.salt_cache("x"), anonymous.salt_cache("")) == ("x", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scopes": ["generate", "root"]}, "unknown scope 'root'"),
        ({"scopes": "admin"}, "scopes must be a list"),
        ({"limits": {"tokens_per_minute": 0}}, "tokens_per_minute must be at least 1"),
        ({"limits": {"token_per_minute": 5}}, "did you mean 'limits.tokens_per_minute'"),
        ({"strict": "yes"}, "strict must be bool"),
        ({"name": "a b"}, "1 to 64 letters"),
        ({"digest": ""}, "salt or digest is damaged"),
        ({"salt": "zz"}, "salt or digest is damaged"),
        ({"cache_salt": ""}, "cache_salt is empty"),
        ({"colour": 1}, "unknown key 'colour'"),
    ],
)
def test_an_invalid_record_is_rejected(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.add("ann")
    document = json.loads(file.path.read_text())
    document["keys"][0] |= change
    file.path.write_text(json.dumps(document))
    with pytest.raises(InvalidConfig, match=message):
        file.read()


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"keys": {}}', b'{"keys": [1]}', b'{"keys": [{}]}', b"\xff"])
def test_an_invalid_file_is_rejected(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_bytes(content)
    with pytest.raises(InvalidConfig, match=r"keys\.json"):
        KeyFile(tmp_path / "keys.json").read()


def test_missing_file_and_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="paceline api-keys add"):
        KeyFile(tmp_path / "keys.json").read()
    with pytest.raises(InvalidConfig, match="create its folder first"):
        KeyFile(tmp_path / "absent" / "keys.json").add("ann")


def test_concurrent_changes_are_all_kept(tmp_path: Path) -> None:
    threads = [threading.Thread(target=KeyFile(tmp_path / "keys.json").add, args=(f"key-{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in KeyFile(tmp_path / "keys.json").read()} == {f"key-{i}" for i in range(8)}
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]


def test_shares_are_stored_and_bounded(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.add("gold", share=KeyShare(weight=2.0, reserved=0.5, priority=-1))
    assert file.read()[0].share == KeyShare(2.0, 0.5, -1)
    document = json.loads(file.path.read_text())
    del document["keys"][0]["share"]  # a file of an earlier version
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert KeyFile(tmp_path / "old.json").read()[0].share == KeyShare()
    with pytest.raises(InvalidConfig, match="reserve 100%"):
        file.add("silver", share=KeyShare(reserved=0.5))
    for wrong in ({"weight": 0.0}, {"reserved": 1.0}, {"priority": 2**40}):
        with pytest.raises(InvalidConfig):
            KeyShare(**wrong)
