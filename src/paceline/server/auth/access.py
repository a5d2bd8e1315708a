"""Who may do what: keys become callers, and paths ask for scopes."""

import logging
import os
from collections.abc import Callable

from paceline.core.errors import InvalidConfig
from paceline.server.auth.api_keys import ApiKey, KeyFile, key_id
from paceline.server.config.config import ServerConfig
from paceline.server.openai.errors import Forbidden, Unauthorised

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
"""How often the file of keys is looked at: a revoked key is good for that long."""
ADMIN = "admin"
"""The name under which the configured `admin_key` is known."""

ANYONE = ApiKey("anyone", id="", cache_salt="", scopes=("generate", "metrics"))
"""Who calls a server without keys."""

OPEN = ("/health", "/ready", "/docs", "/redoc", "/openapi.json", "/dashboard")
"""Anybody's: probes that say no more than a status, the API's description, and the page that asks for a key."""
SCOPED = {"/admin": "admin", "/metrics": "metrics", "/v1/paceline": "metrics"}
"""What asks for another scope than `generate`."""


class Access:
    """The keys in force. Where no file of keys is configured the API is anybody's, and only `/admin` asks for a key."""

    def __init__(
        self,
        keys: KeyFile | None,
        clock: Callable[[], float],
        *,
        admin_key: str | None = None,
        open_metrics: bool = False,
    ) -> None:
        self._file, self._clock, self._open_metrics = keys, clock, open_metrics
        self._admin = None if admin_key is None else ApiKey.of(admin_key, ADMIN, id=ADMIN, scopes=("admin",))
        self._keys: dict[str, ApiKey] = {}
        self._looked, self._stamp = clock(), self._stat()
        if keys is not None:
            self._keys = {key.id: key for key in keys.read()}

    @classmethod
    def of(cls, config: ServerConfig, clock: Callable[[], float]) -> "Access":
        """Raises `InvalidConfig` for a file of keys that is none, or that needs what is not configured."""
        keys = None if config.api_keys is None else KeyFile(config.api_keys)
        access = cls(keys, clock, admin_key=config.admin_key, open_metrics=config.open_metrics)
        strict = [key.name for key in access._keys.values() if key.strict and key.revoked is None]
        if strict and config.audit_trail is None:
            raise InvalidConfig(f"the key {strict[0]!r} is strict, which needs a trail: set `audit_trail` to a file")
        return access

    @property
    def has_admins(self) -> bool:
        """Whether anybody could ever administer this server."""
        return self._file is not None or self._admin is not None

    def admit(self, path: str, authorization: str) -> ApiKey:
        """Who calls `path` with this header. Raises `Unauthorised` or `Forbidden`."""
        scope = self._scope(path)
        if scope is None or (self._file is None and (scope != "admin" or self._admin is None)):
            return ANYONE
        key = self._find(authorization)
        if key is None:
            raise Unauthorised(
                "no valid API key: send one as `Authorization: Bearer …`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if not key.allows(scope):
            raise Forbidden(f"the key {key.name!r} does not have the scope {scope!r}", code="missing_scope")
        return key

    def _scope(self, path: str) -> str | None:
        """None: anybody may."""
        if path == "/" or _under(path, OPEN) or (self._open_metrics and path == "/metrics"):
            return None
        return next((scope for prefix, scope in SCOPED.items() if _under(path, (prefix,))), "generate")

    def _find(self, authorization: str) -> ApiKey | None:
        scheme, _, text = authorization.strip().partition(" ")
        if scheme.lower() != "bearer":
            return None
        text = text.strip()
        self._reload()
        key = self._keys.get(key_id(text) or "", self._admin)
        return key if key is not None and key.matches(text) else None

    def _reload(self) -> None:
        """A file that cannot be read changes nothing: those who have keys go on until somebody has repaired it."""
        if self._file is None or self._clock() < self._looked + RELOAD_SECONDS:
            return
        self._looked, stamp = self._clock(), self._stat()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = {key.id: key for key in self._file.read()}
        except InvalidConfig as error:
            logger.error("the API keys stay as they were: %s", error)

    def _stat(self) -> tuple[int, int, int] | None:
        if self._file is None:
            return None
        try:
            found = os.stat(self._file.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _under(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)
