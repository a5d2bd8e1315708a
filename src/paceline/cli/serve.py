"""`paceline serve`, the OpenAI-compatible server, and `paceline warm`, which compiles its GPU kernels.

`warm` compiles into a folder that can be shipped.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from paceline.cli import console
from paceline.cli.console import describe
from paceline.cli.options import ENGINE, with_settings
from paceline.cli.workers import Ray
from paceline.core.errors import InvalidConfig
from paceline.deploy import load_gateway_config
from paceline.gateway.config import SETTINGS, GatewayConfig, ServerConfig
from paceline.model_files.tokenizer import check_pair

if TYPE_CHECKING:
    from paceline.deploy import ServerReady

QUESTION = "Write a Python function that sorts a list."
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
        from paceline.cli.workers import check_before_start
        from paceline.deploy import is_up

        if not is_up(config.cluster):
            check_before_start(config.cluster)
    else:
        check_pair(config.engine.model, config.engine.draft)  # before the imports and the weights, which take seconds
    doing = "waiting for the workers" if isinstance(config, GatewayConfig) else describe(config.engine)
    if console.err.is_terminal:  # not a spinner: the engine process writes its log to the same terminal
        console.err.print(f"{doing} …", style="dim")
    from paceline.deploy import serve as run

    raise typer.Exit(run(config, lambda ready: console.out.print(banner(ready), soft_wrap=True)))


def banner(ready: "ServerReady") -> Text:
    """Commands to paste into another terminal."""
    body = json.dumps({"model": ready.model, "messages": [{"role": "user", "content": QUESTION}]})
    header = f' -H "Authorization: Bearer ${KEY}"' if ready.needs_key else ""
    key = "" if ready.needs_key else ', api_key="none"'
    return Text.assemble(
        (f"Paceline serves {ready.model} at {ready.url}", "bold green"),
        " (Ctrl-C stops it).\n\n",
        "Dashboard and playground: ",
        (f"{ready.url}/", "bold"),
        "\n\nIn another terminal:\n\n",
        f"export {KEY}=…   # a key from `paceline api-keys add`\n" if ready.needs_key else "",
        f"curl {ready.url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\\n  -d '{body}'\n\n",
        ("or, after pip install openai:\n\n", "dim"),
        "python - <<'EOF'\n"
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{ready.url}/v1"{key})\n'
        f'messages = [{{"role": "user", "content": "{QUESTION}"}}]\n'
        f'for chunk in client.chat.completions.create(model="{ready.model}", messages=messages, stream=True):\n'
        '    print(chunk.choices[0].delta.content or "", end="", flush=True)\n'
        "EOF\n",
    )


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
