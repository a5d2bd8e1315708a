"""Settings as options: the same table that the file and the environment are read with."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.core.config import EngineConfig
from paceline.core.sampling import SamplingParams
from paceline.server.config.config import SETTINGS, SamplingDefaults, ServerConfig, load_config
from paceline.server.config.settings import Setting

ENGINE: Mapping[str, Setting] = {
    name: setting
    for name, setting in SETTINGS.items()
    if name in EngineConfig.__dataclass_fields__ or name.startswith("speculation.")
}
"""What a command needs that runs a model itself."""
METAVARS = {bool: "BOOL", int: "NUM", float: "NUM", str: "TEXT"}

MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens of an answer at the most.", show_default="as configured")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Makes sampled text repeatable.", show_default="drawn")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", show_default="as configured")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this total probability.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens.")]


def with_settings(
    settings: Mapping[str, Setting], load: Callable[..., Any] = load_config
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option a setting, and `--config`; it gets what `load` makes of them as its argument `config`."""
    names = {name.replace(".", "_"): name for name in settings}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            path = arguments.pop("config")
            said = {name: arguments.pop(key) for key, name in names.items()}
            overrides = {name: value for name, value in said.items() if value is not None}
            command(config=load(path, os.environ, overrides), **arguments)

        own = [parameter for parameter in inspect.signature(command).parameters.values() if parameter.name != "config"]
        added = [
            _parameter("config", _CONFIG),
            *(_parameter(key, _option(settings[name])) for key, name in names.items()),
        ]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *added)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def sampling_params(defaults: SamplingDefaults, usual_tokens: int, **given: Any) -> SamplingParams:
    """The request's own fields over the configured ones; None leaves a field as configured. `usual_tokens` is for when
    nobody says how long an answer may be."""
    configured = asdict(defaults)
    configured["max_tokens"] = defaults.max_tokens or usual_tokens
    return SamplingParams(**configured | {name: value for name, value in given.items() if value is not None})


_CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config", envvar="PACELINE_CONFIG", metavar="FILE", help="A YAML file of settings; options win over it."
    ),
]


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(setting: Setting) -> Any:
    """Texts are parsed by the table, so that an option and a variable are read, and refused, alike."""
    return Annotated[
        str | None,
        typer.Option(
            setting.option,
            metavar=METAVARS[setting.kind],
            help=_help(setting),
            rich_help_panel=_panel(setting),
            show_default=False,
        ),
    ]


def _help(setting: Setting) -> str:
    choices = f" One of {', '.join(setting.choices)}." if setting.choices else ""
    default = str(setting.default).lower() if setting.kind is bool else setting.default
    return setting.help + choices + ("" if default is None else f" Default: {default}.")


def _panel(setting: Setting) -> str:
    section = setting.name.rpartition(".")[0]
    if section:
        return {"speculation": "Speculation", "sampling": "Sampling, for requests that do not say"}[section]
    return "Server" if setting.name in ServerConfig.__dataclass_fields__ else "Model and engine"
