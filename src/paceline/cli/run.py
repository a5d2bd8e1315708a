"""`paceline run`, a conversation with a model in the terminal, over the API of a running server or of one that it starts."""

import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.conversation import Conversation, read_messages
from paceline.cli.models import check_or_fetch
from paceline.cli.options import ENGINE, MaxTokens, Seed, Temperature, TopK, TopP, with_settings
from paceline.cli.start_display import StartDisplay
from paceline.core.child import PIPE, STDOUT, ChildProcess
from paceline.core.config import EngineConfig
from paceline.core.errors import PacelineError
from paceline.deploy.servers import RunningServer, running_servers
from paceline.gateway import ServerClient
from paceline.gateway.config import PREFIX, ServerConfig

GRACE = 10.0
"""Seconds that a server of ours has to end."""


class ServerFailed(PacelineError):
    """The server that was started for a conversation has ended. What it wrote is on the terminal."""


@with_settings(ENGINE, has_model_argument=True)
def run(
    config: ServerConfig,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this message, print the answer and leave.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of every conversation.")] = None,
    colors: Annotated[
        bool, typer.Option("--colors", help="Colour each token by its origin: accepted from the draft, or not.")
    ] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
) -> None:
    """Chat with a model.

    Uses a server of this machine that serves the model, or starts one that ends with the conversation. /help lists what can be
    typed; three quotes begin and end a message of several lines. Without a terminal, standard input is the message.
    """
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    options = {name: value for name, value in given.items() if value is not None}
    with _server(config.engine) as url:
        key = os.environ.get("PACELINE_API_KEY") or os.environ.get("OPENAI_API_KEY")
        client = ServerClient(url, key, timeout=600.0)
        conversation = Conversation.of(client, config.engine.model, system, options, colors)
        if prompt is None and not sys.stdin.isatty():
            prompt = sys.stdin.read()
        if prompt is not None:
            conversation.send(prompt, with_figures=False)
            return
        conversation.welcome()
        conversation.run(read_messages())


@contextmanager
def _server(engine: EngineConfig) -> Iterator[str]:
    """The URL of a server with this engine. One that runs is used if nothing but the model is set."""
    if engine == EngineConfig(model=engine.model):
        found = find_server(engine.model)
        if found is not None:
            yield found.url
            return
    check_or_fetch(engine)
    with started_server(engine) as url:
        yield url


def find_server(model: str) -> RunningServer | None:
    """The oldest server of this machine that serves the model."""
    path = os.path.abspath(model)
    return next((server for server in running_servers() if server.serves(model) or path in server.paths), None)


@contextmanager
def started_server(engine: EngineConfig) -> Iterator[str]:
    """The URL of a server that ends with the block. Its start is shown."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
        file = Path(folder) / "server.yaml"
        file.write_text(json.dumps({**asdict(engine), "port": 0, "log_format": "progress", "log_requests": "none"}))
        command = [sys.executable, "-m", "paceline", "serve", "--config", str(file)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        display = stack.enter_context(StartDisplay(console.err, "start the server"))
        child = ChildProcess(command, stdout=PIPE, stderr=STDOUT, environment=environment, ends_by_signal=True)
        stack.callback(child.stop, GRACE)
        output = _Output(child, display)
        url = output.wait()
        display.finish()
        yield url


class _Output:
    """Reads what a server writes, on a thread: shows its start, then reads on so that the server does not wait."""

    def __init__(self, child: ChildProcess, display: StartDisplay) -> None:
        self._child, self._display = child, display
        self._url = ""
        self._is_known = threading.Event()
        threading.Thread(target=self._read, name="paceline-server-output", daemon=True).start()

    def wait(self) -> str:
        """The URL, once the server is ready. Raises `ServerFailed` if it ends before."""
        self._is_known.wait()
        if not self._url:
            raise ServerFailed("the server did not start: see above")
        return self._url

    def _read(self) -> None:
        while raw := self._child.read_line():
            line = raw.decode("utf-8", "replace").rstrip("\n")
            if self._url or not line:
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict) and record.get("message") == "ready" and "address" in record:
                self._url = record["address"]
                self._is_known.set()
            else:
                self._display.receive(line)
        self._is_known.set()
