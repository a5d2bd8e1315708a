"""Draws docs/chat.svg, which the README links: a real answer of the embedded model, as `paceline run --colors` prints it.

python docs/pictures/chat.py
"""

from pathlib import Path

from rich.console import Console

from paceline.cli import console
from paceline.cli.conversation import Conversation
from paceline.cli.run import started_server
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.gateway import ServerClient

QUESTION = "Write a Python class Point with x and y, and methods add, sub and mul."
COMMAND = "paceline run --colors --speculation-depth fixed --speculation-max-depth 5 --temperature 0 --max-tokens 204"


def main() -> None:
    speculation = SpeculationConfig(depth="fixed", max_depth=5)
    with started_server(EngineConfig(draft=None, speculation=speculation)) as url:
        options = {"temperature": 0.0, "max_tokens": 204}
        conversation = Conversation.of(ServerClient(url), "smollm2", None, options, has_colors=True)
        console.out = Console(record=True, width=112, force_terminal=True)
        conversation.welcome()
        console.out.print(f"[bold]>>> [/bold]{QUESTION}", highlight=False)
        conversation.send(QUESTION)
    console.out.save_svg(str(Path(__file__).parent.parent / "chat.svg"), title=COMMAND)


if __name__ == "__main__":
    main()
