import os
import stat

import pytest

from paceline.core.errors import InvalidConfig
from paceline.wire.keys import KEY_ROLES, KeyFolder, KeyPair, generate_key_pair


@pytest.fixture
def folder(tmp_path):
    return KeyFolder.create(tmp_path / "keys")


def test_secret_keys_are_readable_by_the_owner_only(tmp_path):
    previous = os.umask(0)  # the mode must not depend on it
    try:
        folder = KeyFolder.create(tmp_path / "keys")
        assert os.umask(0) == 0
    finally:
        os.umask(previous)
    for role in KEY_ROLES:
        assert stat.S_IMODE((folder.path / f"{role}.key_secret").stat().st_mode) == 0o600
        pair = folder.key_pair(role)
        assert folder.public_key(role) == pair.public
        assert pair.secret not in (folder.path / f"{role}.key").read_text()
    assert len({folder.public_key(role) for role in KEY_ROLES}) == len(KEY_ROLES)


def test_repr_hides_the_secret():
    pair = generate_key_pair()
    assert pair.public in repr(pair)
    assert pair.secret not in repr(pair)


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_secret_key_readable_by_others_is_rejected(folder, mode):
    (folder.path / "target.key_secret").chmod(mode)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        folder.key_pair("target")


def test_keys_are_never_overwritten(folder):
    before = {role: folder.key_pair(role) for role in KEY_ROLES}
    (folder.path / "gateway.key_secret").unlink()
    with pytest.raises(InvalidConfig, match="exists"):
        KeyFolder.create(folder.path)
    assert folder.key_pair("draft") == before["draft"]
    assert not (folder.path / "gateway.key_secret").exists()


@pytest.mark.parametrize(
    "text", ["", "one", 'public-key = "short"', f'public-key = "{chr(233) * 40}"', 'public-key = "~~~~~"']
)
def test_malformed_key_file_is_rejected(folder, text):
    for name in ("gateway.key", "target.key_secret", "allowed/other.key"):
        path = folder.path / name
        path.write_text(text, "utf-8")
        path.chmod(0o600)
    for read in (folder.public_key, folder.server_security):
        with pytest.raises(InvalidConfig, match="paceline keys"):
            read("gateway")
    with pytest.raises(InvalidConfig, match="paceline keys"):
        folder.key_pair("target")


def test_missing_or_public_only_key_is_rejected(folder):
    secret_file = folder.path / "draft.key_secret"
    secret_file.write_text((folder.path / "draft.key").read_text())
    with pytest.raises(InvalidConfig, match="no secret key"):
        folder.key_pair("draft")
    secret_file.unlink()
    with pytest.raises(
        InvalidConfig, match=r"there is no key file .*draft.key_secret: create keys with `paceline keys"
    ):
        folder.key_pair("draft")


def test_allowed_clients_of_each_role(folder, tmp_path):
    gateway, target = folder.public_key("gateway"), folder.public_key("target")
    assert folder.server_security("target").allowed == {gateway, target}
    assert folder.server_security("draft").allowed == {gateway, target}
    assert folder.server_security("gateway").allowed == set()
    assert folder.peer_security("target").allowed == {target}
    other = KeyFolder.create(tmp_path / "other")
    (folder.path / "allowed" / "other.key").write_text((other.path / "gateway.key").read_text())
    assert folder.server_security("draft").allowed == {gateway, target, other.public_key("gateway")}
    assert isinstance(folder.server_security("draft").own, KeyPair)
