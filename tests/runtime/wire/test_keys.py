import os
import stat

import pytest

from paceline.core.errors import InvalidConfig
from paceline.runtime.wire.keys import generate, load, load_allowed, load_public, public_path, save


def test_a_pair_is_saved_for_its_owner_alone_and_read_back(tmp_path):
    pair, path = generate(), tmp_path / "keys" / "worker.key"
    old = os.umask(0)  # the mode must not depend on it
    try:
        save(pair, path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load(path) == pair
    assert load_public(public_path(path)) == pair.public
    assert pair.secret not in public_path(path).read_text()
    assert pair.secret not in repr(pair)


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "k"
    save(generate(), path)
    path.chmod(0o640)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        load(path)


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "k"
    pair = generate()
    save(pair, path)
    with pytest.raises(InvalidConfig, match="exists"):
        save(generate(), path)
    assert load(path) == pair


@pytest.mark.parametrize("text", ["", "one", "a" * 40, "\u00e9" * 40])
def test_what_is_no_key_file_is_refused(tmp_path, text):
    path = tmp_path / "k"
    path.write_text(text, "utf-8")
    path.chmod(0o600)
    with pytest.raises(InvalidConfig):
        load(path)
    with pytest.raises(InvalidConfig, match="paceline keys"):
        load(tmp_path / "missing")


def test_the_list_of_those_let_in(tmp_path):
    one, two = generate().public, generate().public
    path = tmp_path / "allowed"
    path.write_text(f"# the targets\n{one} target-0\n\n{two}\n")
    assert load_allowed(path) == {one, two}
    path.write_text(f"{one}\nnot a key\n")
    with pytest.raises(InvalidConfig, match="line 2"):
        load_allowed(path)


def test_a_folder_of_public_keys(tmp_path):
    pairs = [generate() for _ in range(3)]
    for i, pair in enumerate(pairs):
        save(pair, tmp_path / f"k{i}")
    assert load_allowed(tmp_path) == {pair.public for pair in pairs}
    with pytest.raises(InvalidConfig, match="3 public keys"):
        load_public(tmp_path)
