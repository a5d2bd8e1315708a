"""Reads the server's configuration from a file, the environment and the command line; later ones take precedence."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.config import EngineConfig, from_mapping
from paceline.core.errors import InvalidConfig, UnknownKeys
from paceline.deploy.processes import is_cluster_file, load_cluster
from paceline.gateway.config import (
    PREFIX,
    SETTINGS,
    GatewayConfig,
    LearningConfig,
    SamplingDefaults,
    ServerConfig,
    Setting,
    read_file,
    suggest,
)

OTHER_VARIABLES = frozenset({"PACELINE_CONFIG", "PACELINE_NATIVE"})
"""Variables with our prefix that are not settings: the path of the file, and the switch of the CPU kernels."""
SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)|_PORT=\w+://")
"""Variables that Kubernetes sets in every pod for a service named `paceline`; they have our prefix."""


def load_config(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    section: str | None = None,
) -> ServerConfig:
    """Reads the file at `path`, or only its `section`, then `environ`, then `overrides`.

    `overrides` are command line options: setting names, or option names with dots or dashes, and values as text or parsed.
    Raises `UnknownKeys` with all unknown names, or `InvalidConfig` with the source of a bad value.
    """
    given: dict[str, tuple[Any, str]] = {}
    unknown: list[str] = []
    sources: list[Callable[[], dict[str, tuple[Any, str]]]] = [
        partial(_from_environment, environ or {}),
        partial(_from_options, overrides or {}),
    ]
    if path is not None:
        sources.insert(0, partial(read_file, path, SETTINGS, section))
    for read in sources:
        try:
            given |= read()
        except UnknownKeys as error:
            unknown += error.messages
    if unknown:
        raise UnknownKeys(unknown)
    try:
        config = _build({name: value for name, (value, _) in given.items()})
        config.engine.speculation.check_method(config.engine.draft, has_pool=False)
        return config
    except InvalidConfig as error:
        raise InvalidConfig(f"{error}{_sources(str(error), given)}") from None


def load_gateway_config(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, Any]
) -> ServerConfig | GatewayConfig:
    """`GatewayConfig` if the file has `pools`, with the server's settings in its section `gateway`. Otherwise
    `ServerConfig`."""
    if path is None or not is_cluster_file(path):
        return load_config(path, environ, overrides)
    cluster = load_cluster(path)
    server = load_config(path, environ, overrides, section="gateway")
    if server.engine != EngineConfig():
        raise InvalidConfig(
            f"{path} has pools, which hold the settings of models and engines: remove those settings from `gateway`, the "
            "environment and the command line"
        )
    if server.price is not None:
        raise InvalidConfig(f"{path} has pools: set `price` of each pool, the dollars per hour of one worker")
    if server.served_model_name is not None and len(cluster.models) > 1:
        raise InvalidConfig(
            f"served_model_name names one model, and {path} has several: set `served_model_name` of its target pools instead"
        )
    target = cluster.engines()[f"{cluster.targets[0].name}-0"]
    endpoint = server.trace_endpoint or cluster.trace_endpoint
    return GatewayConfig(replace(server, engine=target, trace_endpoint=endpoint), cluster)


def _build(values: Mapping[str, Any]) -> ServerConfig:
    sections: dict[str, dict[str, Any]] = {"": {}, "speculation": {}, "sampling": {}, "learning": {}}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        sections[section][key] = value
    server_names = {setting for setting in SETTINGS if setting in ServerConfig.__dataclass_fields__}
    engine = {key: value for key, value in sections[""].items() if key not in server_names}
    server = {key: value for key, value in sections[""].items() if key in server_names}
    return from_mapping(
        ServerConfig,
        {
            **server,
            "sampling": from_mapping(SamplingDefaults, sections["sampling"], "sampling."),
            "learning": from_mapping(LearningConfig, sections["learning"], "learning."),
            "engine": from_mapping(EngineConfig, {**engine, "speculation": sections["speculation"]}),
        },
    )


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    by_variable = {setting.variable: setting for setting in SETTINGS.values()}
    own = {
        variable: text
        for variable, text in environ.items()
        if variable.startswith(PREFIX)
        and variable not in OTHER_VARIABLES
        and not SERVICE_LINK.search(f"{variable}={text}")
    }
    if unknown := own.keys() - by_variable.keys():
        raise UnknownKeys(
            [f"unknown environment variable {name!r}; {suggest(name, by_variable)}" for name in sorted(unknown)]
        )
    found = ((by_variable[variable], text, variable) for variable, text in own.items())
    return {setting.name: (_parse(setting, text, variable), variable) for setting, text, variable in found}


def _from_options(overrides: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    by_identifier = {_identifier(name): setting for name, setting in SETTINGS.items()}
    if unknown := [name for name in overrides if _identifier(name) not in by_identifier]:
        raise UnknownKeys([f"unknown option {name!r}; {suggest(name, SETTINGS)}" for name in unknown])
    found = ((by_identifier[_identifier(name)], value) for name, value in overrides.items())
    return {setting.name: (_parse(setting, value, setting.option), setting.option) for setting, value in found}


def _parse(setting: Setting, value: Any, source: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return setting.parse(value)
    except InvalidConfig as error:
        raise InvalidConfig(f"{error} ({source})") from None


def _identifier(name: str) -> str:
    return name.removeprefix("--").replace(".", "_").replace("-", "_")


def _sources(message: str, given: Mapping[str, tuple[Any, str]]) -> str:
    """The sources of the settings that an error message names."""
    sources = [
        f"{name} comes from {source}"
        for name, (_, source) in given.items()
        if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", message)
    ]
    return f" ({'; '.join(sources)})" if sources else ""
