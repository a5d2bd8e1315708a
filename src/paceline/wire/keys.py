"""CURVE keys of a cluster: pyzmq certificates, one pair each for gateways, targets and drafts."""

import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paceline.core.errors import InvalidConfig, MissingDependency
from paceline.core.pool_config import Role

KeyRole = Literal["gateway", "target", "draft"]
KEY_ROLES: tuple[KeyRole, ...] = ("gateway", "target", "draft")
KEY_ROLE_OF: dict[Role, KeyRole] = {"target": "target", "prefill": "target", "draft": "draft"}
"""Key role of each worker role. Prefill workers hold the prompts of targets and share their key."""
CLIENT_ROLES: dict[KeyRole, tuple[KeyRole, ...]] = {
    "gateway": (),
    "target": ("gateway", "target"),
    "draft": ("target", "gateway"),
}
"""Roles that may connect to a server of each role."""
ALLOWED_FOLDER = "allowed"
"""Subfolder with public certificates of further clients, such as a second gateway with its own key."""
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Security:
    """Keys of one endpoint. A server accepts the public keys in `allowed`; a client requires the public key `server`."""

    own: KeyPair
    server: str | None = None
    allowed: frozenset[str] = frozenset()


def generate_key_pair() -> KeyPair:
    try:
        import zmq
    except ImportError:
        raise MissingDependency("pyzmq", "generating keys", "pool") from None
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class KeyFolder:
    """`ROLE.key` (public) and `ROLE.key_secret` for each key role, and the folder `allowed`.

    Files are read on use: a machine needs the secret keys of the roles that it runs, and all public keys.
    """

    path: Path

    @staticmethod
    def create(path: Path) -> "KeyFolder":
        """New keys for all roles. Raises `InvalidConfig` if a key exists; no key is overwritten."""
        try:
            from zmq.auth import create_certificates
        except ImportError:
            raise MissingDependency("pyzmq", "generating keys", "pool") from None
        folder = KeyFolder(path)
        for role in KEY_ROLES:
            if folder._secret_file(role).exists():
                raise InvalidConfig(f"{folder._secret_file(role)} exists: delete it first if no worker uses this key")
        (path / ALLOWED_FOLDER).mkdir(parents=True, exist_ok=True)
        umask = os.umask(0o077)
        try:
            for role in KEY_ROLES:
                public_file, _ = create_certificates(path, role)
                os.chmod(public_file, 0o644)
        finally:
            os.umask(umask)
        return folder

    def key_pair(self, role: KeyRole) -> KeyPair:
        """The key pair of `role`. Raises `InvalidConfig` if other users can read the secret key."""
        path = self._secret_file(role)
        public, secret = _load_certificate(path)
        if secret is None:
            raise InvalidConfig(f"{path} holds no secret key; create keys with `paceline keys`")
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InvalidConfig(f"other users can read the secret key {path}: chmod 600 {path}")
        return KeyPair(public, secret)

    def public_key(self, role: KeyRole) -> str:
        return _load_certificate(self.path / f"{role}.key")[0]

    def server_security(self, role: KeyRole) -> Security:
        """The keys of a server of `role`. Clients of `CLIENT_ROLES` and of the folder `allowed` may connect."""
        allowed = {self.public_key(client) for client in CLIENT_ROLES[role]}
        allowed |= {_load_certificate(file)[0] for file in sorted((self.path / ALLOWED_FOLDER).glob("*.key"))}
        return Security(self.key_pair(role), allowed=frozenset(allowed))

    def peer_security(self, role: KeyRole) -> Security:
        """Keys for connections between workers of one role: they share a key and accept only that key."""
        own = self.key_pair(role)
        return Security(own, allowed=frozenset({own.public}))

    def _secret_file(self, role: KeyRole) -> Path:
        return self.path / f"{role}.key_secret"


def _load_certificate(path: Path) -> tuple[str, str | None]:
    """(public key, secret key or None) of a certificate file."""
    from zmq.auth import load_certificate
    from zmq.utils import z85

    if not path.is_file():  # pyzmq calls a missing file an invalid one
        raise InvalidConfig(f"there is no key file {path}: create keys with `paceline keys {path.parent}`")
    try:
        keys = load_certificate(path)
        if any(key is not None and len(z85.decode(key)) != KEY_BYTES for key in keys):
            raise ValueError(f"a key is not {KEY_BYTES} bytes in Z85")
        public, secret = keys
        return public.decode(), None if secret is None else secret.decode()
    except (OSError, ValueError, KeyError, OverflowError, struct.error) as error:
        raise InvalidConfig(f"cannot read the key {path}: {error}; create keys with `paceline keys`") from None
