"""`paceline serve`: the OpenAI-compatible server."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from paceline.cli.doctor.start_check import check_before_start
from paceline.cli.live.chosen_cluster import Ray
from paceline.cli.options import with_settings
from paceline.cli.render import console
from paceline.cli.render.console import describe
from paceline.core.errors import InvalidConfig
from paceline.server.config.config import SETTINGS, GatewayConfig, ServerConfig
from paceline.server.config.load import load_gateway_config

if TYPE_CHECKING:
    from paceline.server.serve import ServerReady

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
        from paceline.runtime.deploy.deployment import is_up

        if not is_up(config.cluster):
            check_before_start(config.cluster)
    doing = "waiting for the workers" if isinstance(config, GatewayConfig) else describe(config.engine)
    if console.err.is_terminal:  # not a spinner: the engine process writes its log to the same terminal
        console.err.print(f"{doing} …", style="dim")
    from paceline.server.serve import serve as run

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
