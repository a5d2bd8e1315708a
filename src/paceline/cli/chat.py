"""`paceline chat`: a conversation in the terminal, with tokens coloured by origin."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from paceline.bench.summary import Summary
from paceline.bench.trace import AnswerTimes, Arrival
from paceline.cli.options import ENGINE, MaxTokens, Seed, Temperature, TopK, TopP, sampling_params, with_settings
from paceline.cli.render import console
from paceline.cli.render.console import loaded
from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidRequest
from paceline.core.sampling import SamplingParams
from paceline.server.config.config import ServerConfig

if TYPE_CHECKING:
    from paceline.engine.llm import LLM

HELP = "Type a message. /reset clears the conversation, /help shows this line, /exit exits, Ctrl-C stops an answer."
EXITS = ("/exit", "/quit")
MAX_TOKENS = 512


@with_settings(ENGINE)
def chat(
    config: ServerConfig,
    system: Annotated[str | None, typer.Option(help="System message of every conversation.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
) -> None:
    """Chat with a model and see which of its tokens were drafted.

    The colour of a token is its origin: accepted from the draft, recovered after a rejection, bonus, or plain. The text is
    the same with speculation off; only the speed line changes.
    """
    sampling = sampling_params(
        config, MAX_TOKENS, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    with loaded(config.engine) as llm:
        from paceline.cli.render.token_colours import legend

        console.out.print(legend())
        console.out.print(HELP, style="dim", highlight=False)
        Conversation(llm, sampling, system, WallClock()).run()


class Conversation:
    """The messages of one conversation. Only `run` reads from the terminal."""

    def __init__(self, llm: "LLM", sampling: SamplingParams, system: str | None, clock: Clock) -> None:
        self._llm = llm
        self._sampling = sampling
        self._start = [{"role": "system", "content": system}] if system else []
        self._clock = clock
        self.messages = list(self._start)

    def run(self) -> None:
        for line in _lines():
            if line == "/reset":
                self.messages = list(self._start)
                console.out.print("The conversation is cleared.", style="dim")
            elif line == "/help":
                console.out.print(HELP, style="dim", highlight=False)
            elif line.startswith("/"):
                console.out.print(f"{line} is not a command. {HELP}", style="dim", markup=False, highlight=False)
            else:
                self.send(line)

    def send(self, line: str) -> None:
        """Stream the answer to a message and store the message and the answer. An interrupted answer is stored as far as it was
        generated."""
        question = {"role": "user", "content": line}
        try:
            trace = self._answer([*self.messages, question])
        except InvalidRequest as error:  # most likely the context window is full
            console.fail(f"{error}. /reset starts a new conversation.")
            return
        self.messages += [question, {"role": "assistant", "content": trace.text}]
        console.out.print(speed_line(trace), style="dim", highlight=False)

    def _answer(self, messages: list[dict[str, str]]) -> AnswerTimes:
        from paceline.cli.render.token_colours import Painter

        painter = Painter(self._llm.tokenizer)
        arrivals: list[Arrival] = []
        text = ""
        started = self._clock.now()
        stream = self._llm.stream(messages, self._sampling, category="chat")
        try:
            for output in stream:
                arrivals.append(Arrival.of(output, self._clock.now()))
                text += output.text
                _write(painter.paint(output))
        except KeyboardInterrupt:
            stream.close()  # cancels the request
            _write(Text(" [stopped]", "dim"))
        _write(painter.flush())
        console.out.print()
        return AnswerTimes("chat", started, tuple(arrivals), text)


def speed_line(trace: AnswerTimes) -> str:
    summary = Summary.of([trace])
    parts = [f"{summary.tokens} tokens", f"{summary.tokens_per_second:.1f} tok/s"]
    if summary.ttft_p50 is not None:
        parts.append(f"first after {1000 * summary.ttft_p50:.0f} ms")
    if summary.tokens_per_round is not None:
        parts.append(f"{summary.tokens_per_round:.2f} tokens a round")
    if summary.draft_acceptance_rate is None:
        parts.append("no drafts")
    else:
        parts.append(f"{summary.accepted} of {summary.drafted} drafts accepted ({summary.draft_acceptance_rate:.0%})")
    return " · ".join(parts)


def _lines() -> Iterator[str]:
    """Lines from the terminal until /exit or the end of input."""
    while True:
        try:
            line = console.out.input("[bold]> [/bold]").strip()
        except EOFError:
            console.out.print()
            return
        except KeyboardInterrupt:
            console.out.print("\n/exit exits.", style="dim")
            continue
        if line in EXITS:
            return
        if line:
            yield line


def _write(text: Text) -> None:
    """Print without a line end and without wrapping: pieces of a line must not wrap one by one."""
    if text.plain:
        console.out.print(text, end="", soft_wrap=True)
        console.out.file.flush()
