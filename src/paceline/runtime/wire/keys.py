"""Who a worker is and whom it lets in: CURVE key files. A secret key is readable by its owner alone."""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import InvalidConfig, MissingDependency

KEY_LENGTH = 40
"""Characters of a key of 32 bytes in Z85."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Security:
    """`own` identifies this side. A server lets in only `allowed` public keys; a client knows the `server`'s."""

    own: KeyPair
    server: str | None = None
    allowed: frozenset[str] = frozenset()


def generate() -> KeyPair:
    try:
        import zmq
    except ImportError:
        raise MissingDependency("pyzmq", "generating keys", "pool") from None
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def save(pair: KeyPair, path: Path) -> None:
    """`path` gets the secret (mode 0600), `path`.pub the public key. An existing secret is never overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvalidConfig(f"{path} exists: delete it first if this key is no longer trusted anywhere") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{pair.public}\n{pair.secret}\n")
    public_path(path).write_text(pair.public + "\n", "ascii")


def load(path: Path) -> KeyPair:
    """A pair that `save` wrote. Refused if anybody but its owner can read it."""
    try:
        mode, text = path.stat().st_mode, path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"cannot read the key {path}: {error}; make one with `paceline keys`") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidConfig(f"others can read the secret key {path}: chmod 600 {path}")
    lines = text.split()
    if len(lines) != 2 or any(not _is_key(line) for line in lines):
        raise InvalidConfig(f"{path} is no key file: it holds a public and a secret key, a line each")
    return KeyPair(*lines)


def load_public(path: Path) -> str:
    """The one key of a `.pub` file."""
    keys = load_allowed(path)
    if len(keys) != 1:
        raise InvalidConfig(f"{path} holds {len(keys)} public keys, and one was wanted")
    return next(iter(keys))


def load_allowed(path: Path) -> frozenset[str]:
    """Public keys, one a line; anything after the key, and lines beginning with #, are for people. A folder: its .pub files."""
    if path.is_dir():
        return frozenset(key for file in sorted(path.glob("*.pub")) for key in load_allowed(file))
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"cannot read the public keys in {path}: {error}") from None
    keys = set()
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or (words[0].startswith("#") and not _is_key(words[0])):
            continue
        if not _is_key(words[0]):
            raise InvalidConfig(f"{path}, line {number}: not a public key of {KEY_LENGTH} characters")
        keys.add(words[0])
    return frozenset(keys)


def public_path(path: Path) -> Path:
    return path.with_name(path.name + ".pub")


def _is_key(text: str) -> bool:
    alphabet = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    return len(text) == KEY_LENGTH and set(text) <= set(alphabet)
