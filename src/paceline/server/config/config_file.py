"""The YAML file, with our names or with those that other servers' files use."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidConfig, MissingDependency
from paceline.server.config.settings import Setting, nearest

ALIASES = {
    "speculative_model": "draft",
    "num_speculative_tokens": "speculation.max_depth",
    "draft_acceptance_threshold": "speculation.acceptance_threshold",
    "enable_prefix_caching": "prefix_caching",
    "gpu_memory_utilization": "memory_fraction",
    "orchestration.adaptive_draft": "speculation.depth",
    "orchestration.min_draft_length": "speculation.min_depth",
    "orchestration.max_draft_length": "speculation.max_depth",
    "orchestration.fallback_after_low_acceptance": "speculation.breaker_rounds",
}
"""Names in files written for others, and ours."""
OVERRIDES = {"orchestration.max_draft_length": "num_speculative_tokens"}
"""Where such a file says both, the first is meant."""
ADAPTIVE = {True: "additive", False: "fixed"}
"""`adaptive_draft`: the rule whose bounds `min_draft_length` and `max_draft_length` are, or no rule at all."""


def read_file(path: Path, settings: Mapping[str, Setting], section: str | None = None) -> dict[str, tuple[Any, str]]:
    """{setting: (value, where it was said)}. `section`: the settings stand there, and the rest is not ours."""
    values: dict[str, tuple[Any, str]] = {}
    document = _load(path)
    said = dict(_flatten(document if section is None else document.get(section) or {}, path))
    for key, value in said.items():
        name = ALIASES.get(key, key)
        if value is None and any(one.startswith(f"{key}.") for one in settings):
            continue  # a section with nothing in it
        if name not in settings:
            raise InvalidConfig(f"unknown key {key!r} in {path}; {nearest(key, [*settings, *ALIASES])}")
        if key in OVERRIDES.values() and any(other in said for other, weaker in OVERRIDES.items() if weaker == key):
            continue
        if name in values:
            raise InvalidConfig(f"{values[name][1]} and {key!r} in {path} are the same setting: keep one of them")
        if key == "orchestration.adaptive_draft":
            if not isinstance(value, bool):
                raise InvalidConfig(f"{key} must be true or false, got {value!r} (in {path})")
            value = ADAPTIVE[value]
        values[name] = value, f"{key!r} in {path}"
    return values


def _load(path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingDependency("pyyaml", "a configuration file", "server") from None
    try:
        return yaml.safe_load(path.read_text("utf-8")) or {}
    except OSError as error:
        raise InvalidConfig(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} is not YAML: {error}") from None


def _flatten(document: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Sections become prefixes. There is one level of them."""
    if not isinstance(document, Mapping):
        raise InvalidConfig(f"{path} must be a mapping of settings, got {document!r}")
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", one) for inner, one in value.items())
        else:
            yield str(key), value
