"""Reads `cluster.yaml`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.cluster_config import ClusterConfig, cluster_config
from paceline.core.errors import InvalidConfig, UnknownKeys
from paceline.gateway.config import SETTINGS, read_file, read_yaml


def is_cluster_file(path: Path) -> bool:
    """Whether the file has `pools`. Otherwise it holds the settings of one server."""
    return "pools" in _document(path)


def load_cluster(path: Path) -> ClusterConfig:
    """The configuration. Folders in it are relative to the file. Raises `UnknownKeys` with all unknown keys, also those of the
    section `gateway`."""
    document = _document(path)
    unknown: list[str] = []
    try:
        config = cluster_config(document)
    except UnknownKeys as error:
        unknown += [f"{path}: {message}" for message in error.messages]
    except InvalidConfig as error:
        raise InvalidConfig(f"{path}: {error}") from None
    try:
        read_file(path, SETTINGS, "gateway")
    except UnknownKeys as error:
        unknown += error.messages
    if unknown:
        raise UnknownKeys(unknown)
    pools = tuple(
        replace(pool, limits=replace(pool.limits, kv_disk=_relative_to(path, pool.limits.kv_disk)))
        for pool in config.pools
    )
    return replace(
        config, keys=_relative_to(path, config.keys), state_dir=_relative_to(path, config.state_dir), pools=pools
    )


def _relative_to(path: Path, folder: str | None) -> str | None:
    return None if folder is None else str((path.parent / Path(folder).expanduser()).resolve())


def _document(path: Path) -> Mapping[str, Any]:
    document = read_yaml(path)
    if not isinstance(document, Mapping):
        raise InvalidConfig(f"{path} must be a mapping of settings, got {document!r}")
    return document
