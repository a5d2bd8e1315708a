"""Authentication by API key, and the scope that each path needs."""

import logging
import math
import os
from collections.abc import Callable

from paceline.core.errors import InvalidConfig
from paceline.gateway.api.errors import Forbidden, RateLimited, Unauthorised
from paceline.gateway.auth.api_keys import ApiKey, KeyFile, KeyShare, key_id
from paceline.gateway.auth.rate_limit import WrongKeys
from paceline.gateway.config import ServerConfig

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
"""Interval at which the key file is checked; a revoked key stays valid that long."""
ADMIN_NAME = "admin"
"""Name of the key in the setting `admin_key`."""

ANONYMOUS = ApiKey(
    "anyone",
    id="",
    cache_salt="",
    scopes=("generate", "metrics"),
    share=KeyShare(priority=1 - 2**31),
    learning=True,
)
"""Key of every request to a server without keys. There the setting `learning` alone is the consent."""

OPEN_PATHS = ("/health", "/ping", "/ready", "/version", "/docs", "/openapi.json", "/dashboard", "/planner")
"""Paths without a key: health checks, the API description and the dashboard pages, which prompt for a key."""
PATH_SCOPES = {"/admin": "admin", "/metrics": "metrics", "/v1/paceline": "metrics"}
"""Path prefixes that need another scope than `generate`."""


class Access:
    """The valid API keys. Without a key file only `/admin` needs a key."""

    def __init__(
        self,
        keys: KeyFile | None,
        clock: Callable[[], float],
        *,
        admin_key: str | None = None,
        open_metrics: bool = False,
    ) -> None:
        self._file, self._clock, self._open_metrics = keys, clock, open_metrics
        self._admin = (
            None if admin_key is None else ApiKey.from_text(admin_key, ADMIN_NAME, id=ADMIN_NAME, scopes=("admin",))
        )
        self._keys: dict[str, ApiKey] = {}
        self._wrong_keys = WrongKeys(clock)
        self._checked, self._file_stat = clock(), self._stat()
        if keys is not None:
            self._keys = {key.id: key for key in keys.read()}

    @classmethod
    def from_config(cls, config: ServerConfig, clock: Callable[[], float]) -> "Access":
        """Raises `InvalidConfig` if the key file is invalid, or if it has strict keys and no audit log is configured."""
        keys = None if config.api_keys is None else KeyFile(config.api_keys)
        access = cls(keys, clock, admin_key=config.admin_key, open_metrics=config.open_metrics)
        strict = [key.name for key in access._keys.values() if key.strict and key.revoked is None]
        if strict and config.audit_trail is None:
            raise InvalidConfig(f"the key {strict[0]!r} is strict and needs an audit log: set `audit_trail` to a file")
        return access

    @property
    def has_admin_routes(self) -> bool:
        """Whether the server has keys that may open `/admin`."""
        return self._file is not None or self._admin is not None

    @property
    def has_keys(self) -> bool:
        """Whether the API needs a key."""
        return self._file is not None

    def reserved_shares(self) -> dict[str, float]:
        """Shares of the server that keys have reserved, by key id."""
        return {key.id: key.share.reserved for key in self._keys.values() if key.share.reserved and key.revoked is None}

    def authenticate(self, path: str, authorization: str, address: str = "") -> ApiKey:
        """The key in the Authorization header. Raises `Unauthorised`, `Forbidden` if the key lacks the scope of `path`, or
        `RateLimited` if the client's `address` sent too many wrong keys."""
        scope = self._scope(path)
        if scope is None or (self._file is None and (scope != "admin" or self._admin is None)):
            return ANONYMOUS
        seconds = self._wrong_keys.wait_seconds(address)
        key = self._find(authorization, is_throttled=seconds > 0)
        if key is None:
            if seconds > 0:
                raise RateLimited("this address sent too many wrong keys", math.ceil(seconds))
            self._wrong_keys.record(address)
            raise Unauthorised(
                "no valid API key: send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if not key.has_scope(scope):
            raise Forbidden(f"the key {key.name!r} does not have the scope {scope!r}", code="missing_scope")
        return key

    def _scope(self, path: str) -> str | None:
        """The scope that `path` needs; None if it needs no key."""
        if path == "/" or _is_under(path, OPEN_PATHS) or (self._open_metrics and path == "/metrics"):
            return None
        return next((scope for prefix, scope in PATH_SCOPES.items() if _is_under(path, (prefix,))), "generate")

    def _find(self, authorization: str, is_throttled: bool) -> ApiKey | None:
        scheme, _, text = authorization.strip().partition(" ")
        if scheme.lower() != "bearer":
            return None
        text = text.strip()
        self._reload()
        # A throttled address may still use a key of the file: it has 256 random bits. `admin_key` may be guessed.
        key = self._keys.get(key_id(text) or "", None if is_throttled else self._admin)
        return key if key is not None and key.matches(text) else None

    def _reload(self) -> None:
        """Reads the key file again if it changed. An invalid file changes nothing: the current keys stay valid."""
        if self._file is None or self._clock() < self._checked + RELOAD_SECONDS:
            return
        self._checked, file_stat = self._clock(), self._stat()
        if file_stat == self._file_stat:
            return
        self._file_stat = file_stat
        try:
            self._keys = {key.id: key for key in self._file.read()}
        except InvalidConfig as error:
            logger.error("the key file is invalid, so the current keys stay valid: %s", error)

    def _stat(self) -> tuple[int, int, int] | None:
        if self._file is None:
            return None
        try:
            stat = os.stat(self._file.path)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _is_under(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)
