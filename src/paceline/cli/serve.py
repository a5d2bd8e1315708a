"""`paceline serve`: the OpenAI-compatible server."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from paceline.cli import console
from paceline.cli.models import describe
from paceline.cli.options import with_settings
from paceline.cli.up import Ray
from paceline.core.errors import InvalidConfig
from paceline.server.config.config import SETTINGS, ServerConfig
from paceline.server.gateway.gateway_config import GatewayConfig, load_served

if TYPE_CHECKING:
    from paceline.server.serve import Ready

QUESTION = "Why is the sky blue?"
KEY = "OPENAI_API_KEY"
"""Where OpenAI's client looks for a key."""


@with_settings(SETTINGS, load_served)
def serve(config: ServerConfig | GatewayConfig, ray: Ray = None) -> None:
    """Serve a model over an OpenAI-compatible API, with speculation on.

    A file that names pools (--config cluster.yaml) serves a cluster: workers that `paceline up` started are used, and without
    those they are started here and end with the server.

    Every option may also stand in a YAML file (--config) or in the environment, under the same name: --max-num-seqs is
    max_num_seqs in the file and PACELINE_MAX_NUM_SEQS in the environment. Ctrl-C or SIGTERM lets running requests finish.
    """
    if ray is not None:
        if not isinstance(config, GatewayConfig):
            raise InvalidConfig("--ray is for a cluster: give the file that names its pools, --config cluster.yaml")
        config = replace(config, cluster=replace(config.cluster, ray=ray))
    doing = "waiting for the workers" if isinstance(config, GatewayConfig) else describe(config.engine)
    with console.err.status(doing) as status:
        from paceline.server.gateway.cluster import serve_cluster
        from paceline.server.serve import serve as run

        def show(ready: "Ready") -> None:
            status.stop()
            console.out.print(banner(ready), soft_wrap=True)

        code = serve_cluster(config, show) if isinstance(config, GatewayConfig) else run(config, show)
    raise typer.Exit(code)


def banner(ready: "Ready") -> Text:
    """What to paste into another terminal."""
    body = json.dumps({"model": ready.model, "messages": [{"role": "user", "content": QUESTION}]})
    header = f' -H "Authorization: Bearer ${KEY}"' if ready.needs_key else ""
    key = "" if ready.needs_key else ', api_key="none"'
    return Text.assemble(
        (f"Paceline serves {ready.model} at {ready.url}", "bold green"),
        " (Ctrl-C stops it). In another terminal:\n\n",
        f"export {KEY}=…   # a key made by `paceline api-keys add`\n" if ready.needs_key else "",
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
