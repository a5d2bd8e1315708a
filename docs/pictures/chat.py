"""Draws docs/chat.svg, which the README links: a real answer of the embedded model, as `paceline chat` prints it.

python docs/pictures/chat.py
"""

from pathlib import Path

from rich.console import Console

from paceline.cli import console
from paceline.cli.chat import HELP, Conversation, legend
from paceline.core.clock import WallClock
from paceline.core.request import SamplingParams
from paceline.engine.start.llm import LLM

QUESTION = "Write a Python class Point with x and y, and methods add, sub and mul."
COMMAND = "paceline chat --speculation-depth fixed --speculation-max-depth 5 --temperature 0 --max-tokens 204"


def main() -> None:
    console.out = Console(record=True, width=112, force_terminal=True)
    with LLM("smollm2", speculation={"depth": "fixed", "max_depth": 5}) as llm:
        console.out.print(legend())
        console.out.print(HELP, style="dim", highlight=False)
        console.out.print(f"[bold]> [/bold]{QUESTION}", highlight=False)
        Conversation(llm, SamplingParams(temperature=0.0, max_tokens=204), None, WallClock()).send(QUESTION)
    console.out.save_svg(str(Path(__file__).parent.parent / "chat.svg"), title=COMMAND)


if __name__ == "__main__":
    main()
