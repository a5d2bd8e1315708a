"""`paceline serve`, the OpenAI-compatible server, and `paceline warm`, which compiles its GPU kernels.

`warm` compiles into a folder that can be shipped.
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from paceline.cli import console
from paceline.cli.models import check_or_fetch
from paceline.cli.options import ENGINE, with_settings
from paceline.cli.start_display import StartDisplay
from paceline.cli.workers import Ray, check_before_start
from paceline.core.errors import InvalidConfig
from paceline.deploy import load_gateway_config
from paceline.gateway.config import SETTINGS, GatewayConfig, ServerConfig

if TYPE_CHECKING:
    from paceline.deploy import ServerReady

QUESTION = "Write a Python function that sorts a list."
STORY = "Once upon a time"
KEY = "OPENAI_API_KEY"
"""Environment variable that OpenAI's client reads."""


@with_settings(SETTINGS, load_gateway_config, has_model_argument=True)
def serve(config: ServerConfig | GatewayConfig, ray: Ray = None) -> None:
    """Serve a model over an OpenAI-compatible API, with speculation on.

    A file with pools (--config cluster.yaml) serves a cluster. The gateway uses the workers that `paceline up` started;
    without them it checks the file as `paceline doctor CLUSTER.yaml` does, and starts workers that end with it.

    Every option can also be set in a YAML file (--config) or in the environment: --max-num-seqs is max_num_seqs in the file
    and PACELINE_MAX_NUM_SEQS in the environment. After Ctrl-C or SIGTERM running requests finish.
    """
    if ray is not None:
        if not isinstance(config, GatewayConfig):
            raise InvalidConfig("--ray needs a cluster: give a file with pools, --config cluster.yaml")
        config = replace(config, cluster=replace(config.cluster, ray=ray))
    if isinstance(config, GatewayConfig):
        from paceline.deploy import is_up

        if not is_up(config.cluster):
            check_before_start(config.cluster)
    else:
        check_or_fetch(config.engine)  # before the imports and the weights, which take seconds
    from paceline.deploy import serve as run

    server = config.server if isinstance(config, GatewayConfig) else config
    if server.log_format == "progress":
        raise typer.Exit(run(config))
    if not server.logs_for_people:
        raise typer.Exit(run(config, lambda ready: console.out.print(banner(ready), soft_wrap=True)))
    first = "wait for workers" if isinstance(config, GatewayConfig) else "start the engine"
    with StartDisplay(console.err, first, server.log_level == "debug") as display:

        def show(ready: "ServerReady") -> None:
            display.finish()
            console.out.print(banner(ready), soft_wrap=True)

        raise typer.Exit(run(config, show, display.receive))


def banner(ready: "ServerReady") -> Text:
    """What is served, and commands to paste into another terminal that fit the model."""
    model = ready.model.partition(", ")[0]
    prompt = {"messages": [{"role": "user", "content": QUESTION}]} if ready.has_template else {"prompt": STORY}
    body = json.dumps({"model": model, **prompt})
    route = "chat/completions" if ready.has_template else "completions"
    header = f' -H "Authorization: Bearer ${KEY}"' if ready.needs_key else ""
    key = "" if ready.needs_key else ', api_key="none"'
    return Text.assemble(
        (f"Paceline serves {ready.model} at {ready.url}", "bold green"),
        " (Ctrl-C stops it).\n",
        *_window(ready),
        "" if ready.has_template else "It has no chat template: it continues texts.\n",
        "\nDashboard and playground: ",
        (f"{ready.url}/", "bold"),
        "\n\nIn another terminal:\n\n",
        f"export {KEY}=…   # a key from `paceline api-keys add`\n" if ready.needs_key else "",
        (f"paceline run {shlex.quote(model)}\n", "") if not ready.needs_key else "",
        f"curl {ready.url}/v1/{route}{header} -H 'Content-Type: application/json' \\\n  -d '{body}'\n\n",
        ("or, after pip install openai:\n\n", "dim"),
        "python - <<'EOF'\n"
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{ready.url}/v1"{key})\n'
        + (_CHAT if ready.has_template else _COMPLETION).format(model=model)
        + "EOF\n",
    )


_CHAT = f"""\
messages = [{{{{"role": "user", "content": "{QUESTION}"}}}}]
for chunk in client.chat.completions.create(model="{{model}}", messages=messages, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
"""
_COMPLETION = f"""\
for chunk in client.completions.create(model="{{model}}", prompt="{STORY}", max_tokens=200, stream=True):
    print(chunk.choices[0].text, end="", flush=True)
"""


def _window(ready: "ServerReady") -> tuple[str, ...]:
    """The context window, with the setting that raises a reduced one."""
    if ready.window is None:
        return ()
    if ready.own_window is None or ready.window >= ready.own_window:
        return (f"Context: {ready.window:,} tokens.\n",)
    own = ready.own_window
    return (f"Context: {ready.window:,} of the model's {own:,} tokens; --max-model-len {own} raises it.\n",)


Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder for the compiled kernels.")]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu", metavar="NAME", help="The GPU to compile for: h100, h200 or a100. Default: this machine's GPU."
    ),
]


@with_settings(ENGINE)
def warm(config: ServerConfig, out: Out, gpu: Gpu = None) -> None:
    """Compile all GPU kernels that serve with the same options needs, on all cores.

    Serve with --kernel-cache FOLDER, here or on another machine with the same GPU and the same versions of torch and Triton.
    With --gpu the machine that compiles needs no GPU. No weights are read.
    """
    with console.err.status("compiling kernels"):
        from paceline.engine.start import compile_into

        report = compile_into(out, config.engine, gpu)
    console.out.print(
        f"{report.kernels} kernels in {out} ({report.compiled} compiled now) after {report.seconds:.0f} s: "
        f"paceline serve --kernel-cache {out}, with the same options",
        soft_wrap=True,
    )
    if not report.has_launchers:
        console.out.print("The launchers need libcuda: the first start on a machine with a GPU adds them, in seconds.")
