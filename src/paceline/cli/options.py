"""Options that several commands share: settings as options, and the files that commands write.

The files have the option --json, a check of their folders, and a line about each file written.
"""

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli import console
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig, InvalidRequest
from paceline.core.request import SamplingParams
from paceline.deploy import load_config
from paceline.gateway.config import SETTINGS, ServerConfig, Setting

ENGINE: Mapping[str, Setting] = {
    name: setting
    for name, setting in SETTINGS.items()
    if name in EngineConfig.__dataclass_fields__ or name.startswith("speculation.")
}
"""Settings of a command that runs a model itself."""
METAVARS = {bool: "true|false", int: "NUM", float: "NUM", str: "TEXT"}

MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.", show_default="as configured")]
Seed = Annotated[int | None, typer.Option(min=0, help="Makes sampled text repeatable.", show_default="random")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", show_default="as the model recommends")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this total probability.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens.")]


def with_settings(
    settings: Mapping[str, Setting], load: Callable[..., Any] = load_config, has_model_argument: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add one option per setting, and `--config`, to a command. The command receives `load`'s result as `config`.
    `has_model_argument` says that the first argument is another way to give --model."""
    names = {name.replace(".", "_"): name for name in settings}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            path = arguments.pop("config")
            given = {name: arguments.pop(key) for key, name in names.items()}
            overrides = {name: value for name, value in given.items() if value is not None}
            model = arguments.pop(_MODEL, None)
            if model is not None and overrides.setdefault("model", model) != model:
                raise InvalidConfig(f"the model is given twice, as {model} and as --model {overrides['model']}")
            command(config=load(path, os.environ, overrides), **arguments)

        own = [parameter for parameter in inspect.signature(command).parameters.values() if parameter.name != "config"]
        added = [
            *([_parameter(_MODEL, _MODEL_ARGUMENT)] if has_model_argument else []),
            _parameter("config", _CONFIG),
            *(_parameter(key, _option(settings[name])) for key, name in names.items()),
        ]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *added)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def sampling_params(config: ServerConfig, usual_tokens: int, **given: Any) -> SamplingParams:
    """The sampling parameters. Given fields override configured fields, which override those that the model recommends. None
    counts as absent. `usual_tokens` is `max_tokens` when none has one."""
    given["max_tokens"] = given.get("max_tokens") or config.sampling.max_tokens or usual_tokens
    return config.sampling.params(config.engine.model, **given)


_MODEL = "model_argument"
_MODEL_ARGUMENT = Annotated[str | None, typer.Argument(metavar="MODEL", help="The model; the same as --model.")]
_CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config", envvar="PACELINE_CONFIG", metavar="FILE", help="A YAML file of settings; options override it."
    ),
]


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(setting: Setting) -> Any:
    """An option with a text value: the settings table parses options and environment variables alike."""
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
        return {
            "speculation": "Speculation",
            "sampling": "Sampling defaults, for requests without them",
            "learning": "Learning, see `paceline learn`",
        }[section]
    return "Server" if setting.name in ServerConfig.__dataclass_fields__ else "Model and engine"


def default_to(name: str) -> type[TyperGroup]:
    """A command group that runs `name` unless the first argument is one of its commands. Its help lists the other commands."""

    class Group(TyperGroup):
        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            command = super().get_command(ctx, cmd_name)
            if command is not None and cmd_name == name:
                others = ", ".join(f"`{ctx.command_path} {other}`" for other in self.commands if other != name)
                line = f"Other commands: {others}"
                known = (command.epilog or "").removesuffix(line).rstrip()
                command.epilog = f"{known}\n\n{line}".lstrip()
            return command

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's context
            return super().parse_args(ctx, args if args and args[0] in self.commands else [name, *args])

    return Group


JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures.")]


def check_folders(*files: Path | None) -> None:
    """Raise `InvalidRequest` if the folder of a file does not exist. Commands call it before they measure."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise InvalidRequest(f"cannot write {file}: there is no folder {file.parent}", field="file")


def check_plots(*files: Path | None) -> None:
    """Raise `MissingDependency` if a file with a plot is wanted without matplotlib. Commands call it before they measure."""
    if any(file is not None for file in files):
        from paceline.tools.plots import load_pyplot

        load_pyplot()


def write_json(file: Path, figures: dict[str, Any]) -> None:
    file.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


def print_written(*files: Path | None) -> None:
    """Print a line about each written file. A file that was not requested is None."""
    for file in files:
        if file is not None:
            console.out.print(f"wrote {file}", markup=False, soft_wrap=True)
