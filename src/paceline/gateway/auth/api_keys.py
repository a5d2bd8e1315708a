"""API keys and the key file: JSON with a salted hash of every key, without the keys themselves.

A key is `pl-ID-SECRET`. The id selects the record and is public. The secret has 256 random bits, so a fast hash is safe and
a check takes microseconds.
"""

import difflib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.config import from_mapping
from paceline.core.errors import InvalidConfig

if TYPE_CHECKING:
    from starlette.requests import Request

SCOPES = ("generate", "metrics", "admin")
"""`generate` permits the API, `metrics` the metrics and the dashboard's data, `admin` the run-time flags and all that `metrics`
permits."""
MAX_RESERVED = 0.9
"""Largest share of the server that all keys together may reserve."""
NAME = re.compile(r"[\w.@+-]{1,64}")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; None means no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output tokens per minute."""
    max_concurrent: int | None = None
    """Choices that run at the same time."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and value < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True)
class KeyShare:
    """What a key gets of a server that is full."""

    weight: float = 1.0
    """Weight in the queue: a key of weight 2 is served twice the tokens of a key of weight 1."""
    reserved: float = 0.0
    """Share of the batch and of the KV cache that other keys may not use."""
    priority: int = 0
    """Lowest priority number that its requests may have; a lower number is served first."""

    def __post_init__(self) -> None:
        if not 0.001 <= self.weight <= 1000:
            raise InvalidConfig(f"weight must be in [0.001, 1000], got {self.weight}")
        if not 0 <= self.reserved <= MAX_RESERVED:
            raise InvalidConfig(f"reserved must be in [0, {MAX_RESERVED}], got {self.reserved}")
        if abs(self.priority) > 2**31 - 1:
            raise InvalidConfig(f"priority must have at most 31 bits, got {self.priority}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The record of one key. It does not contain the key."""

    name: str
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    salt: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    digest: str = field(default="", repr=False)
    """Salted blake2b hash of the whole key, in hex."""
    scopes: tuple[str, ...] = ("generate",)
    limits: KeyLimits = field(default_factory=KeyLimits)
    share: KeyShare = field(default_factory=KeyShare)
    strict: bool = False
    """Whether all its requests run in strict mode: no drafts, and an audit log."""
    learning: bool = False
    """Whether the token ids of its streams may train drafts that other keys use too."""
    cache_salt: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """Salt that separates the cached prefixes of this key from those of all other keys."""
    created: str = field(default_factory=lambda: _now())
    revoked: str | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidConfig(f"a key name must have 1 to 64 letters, digits and . @ + - _, got {self.name!r}")
        for scope in self.scopes:
            if scope not in SCOPES:
                raise InvalidConfig(f"key {self.name!r}: unknown scope {scope!r}; choose from: {', '.join(SCOPES)}")

    @classmethod
    def from_text(cls, text: str, name: str, **properties: Any) -> "ApiKey":
        """The record of the key `text`."""
        key = cls(name, **properties)
        return replace(key, digest=key._digest(text))

    def matches(self, text: str) -> bool:
        """Whether `text` is this key and the key is valid. Compares in constant time."""
        return self.revoked is None and hmac.compare_digest(self._digest(text), self.digest)

    def has_scope(self, scope: str) -> bool:
        return scope in self.scopes or (scope == "metrics" and "admin" in self.scopes)

    def salt_cache(self, cache_salt: str) -> str:
        """The prefix-cache salt of a request with `cache_salt`. Two keys never get the same salt."""
        if not cache_salt or not self.cache_salt:
            return self.cache_salt or cache_salt
        return hashlib.blake2b(cache_salt.encode(), key=self.cache_salt.encode(), digest_size=16).hexdigest()

    def _digest(self, text: str) -> str:
        data = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, salt=bytes.fromhex(self.salt), person=b"paceline/key", digest_size=32).hexdigest()


class KeyFile:
    """The key file. `paceline api-keys` replaces it atomically; a server only reads it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def read(self) -> tuple[ApiKey, ...]:
        """All keys, including revoked ones. Raises `InvalidConfig` if the file is invalid."""
        try:
            document = json.loads(self.path.read_text("utf-8"))
        except FileNotFoundError:
            advice = f"create it with `paceline api-keys add NAME --file {self.path}`"
            raise InvalidConfig(f"no key file {self.path}: {advice}") from None
        except OSError as error:
            raise InvalidConfig(f"cannot read the key file {self.path}: {error.strerror}") from None
        except ValueError as error:
            raise InvalidConfig(f"{self.path} is not JSON: {error}") from None
        if not isinstance(document, dict) or not isinstance(document.get("keys"), list):
            raise InvalidConfig(f"{self.path} is not a key file: it must be an object with a list `keys`")
        try:
            keys = tuple(_parsed(values) for values in document["keys"])
            _check_reserved(keys)
        except InvalidConfig as error:
            raise InvalidConfig(f"{self.path}: {error}") from None
        return keys

    def add(self, name: str, **properties: Any) -> str:
        """Creates a key and returns it. The file does not contain it, so it cannot be read again."""
        key_id = secrets.token_hex(6)
        text = f"pl-{key_id}-{secrets.token_urlsafe(32)}"
        key = ApiKey.from_text(text, name, id=key_id, **properties)
        with self._locked():
            keys = self.read() if self.path.exists() else ()
            if any(other.name == name and other.revoked is None for other in keys):
                raise InvalidConfig(f"{self.path} has a key {name!r}: choose another name, or revoke that key first")
            _check_reserved((*keys, key))
            self._write((*keys, key))
        return text

    def revoke(self, name: str) -> None:
        with self._locked():
            keys = self.read()
            valid = {key.name: key for key in keys if key.revoked is None}
            if name not in valid:
                close = difflib.get_close_matches(name, valid, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "`paceline api-keys list` shows all keys"
                raise InvalidConfig(f"{self.path} has no valid key {name!r}; {hint}")
            self._write([replace(key, revoked=_now()) if key is valid[name] else key for key in keys])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the folder: concurrent changes could lose a revocation."""
        try:
            folder = os.open(self.path.parent, os.O_RDONLY)
        except OSError as error:
            raise InvalidConfig(f"cannot write {self.path}: {error.strerror}; create its folder first") from None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _write(self, keys: Sequence[ApiKey]) -> None:
        document = {"keys": [asdict(key) for key in keys]}
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.path.parent, prefix=f".{self.path.name}.", delete=False
            ) as file:  # readable by the owner only
                json.dump(document, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            Path(file.name).replace(self.path)
        except OSError as error:
            raise InvalidConfig(f"cannot write {self.path}: {error.strerror}") from None


def key_id(text: str) -> str | None:
    """The id in a key; None if `text` does not have the format of a key."""
    parts = text.split("-", 2)
    return parts[1] if len(parts) == 3 and parts[0] == "pl" else None


def _check_reserved(keys: Sequence[ApiKey]) -> None:
    reserved = sum(key.share.reserved for key in keys if key.revoked is None)
    if reserved > MAX_RESERVED + 1e-9:
        raise InvalidConfig(f"the keys reserve {reserved:.0%} of the server; at most {MAX_RESERVED:.0%}")


def _parsed(values: Any) -> ApiKey:
    if not isinstance(values, dict):
        raise InvalidConfig(f"a key must be an object, got {values!r}")
    scopes = values.get("scopes", [])
    if not isinstance(scopes, list) or not all(isinstance(scope, str) for scope in scopes):
        raise InvalidConfig(f"scopes must be a list of strings, got {scopes!r}")
    missing = [name for name in ApiKey.__dataclass_fields__ if name not in values and name != "share"]
    if missing:
        raise InvalidConfig(f"a key lacks {', '.join(missing)}")
    key = from_mapping(ApiKey, {name: value for name, value in values.items() if name != "scopes"})
    if not re.fullmatch(r"[0-9a-f]{32}", key.salt) or not re.fullmatch(r"[0-9a-f]{64}", key.digest):
        raise InvalidConfig(f"key {key.name!r}: salt or digest is damaged")
    if not key.cache_salt:
        raise InvalidConfig(f"key {key.name!r}: cache_salt is empty, so its cached prefixes would be shared")
    return replace(key, scopes=tuple(scopes))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def request_key(http: "Request") -> ApiKey:
    """The key of an authenticated request."""
    key: ApiKey = http.state.key
    return key
