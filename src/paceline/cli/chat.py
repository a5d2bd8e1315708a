"""`paceline chat`, a conversation in the terminal, and `paceline generate`, one prompt with one or more completions.

`Painter` colours tokens by origin: accepted, recovered, bonus or plain.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from paceline.cli import console
from paceline.cli.console import loaded
from paceline.cli.options import ENGINE, MaxTokens, Seed, Temperature, TopK, TopP, sampling_params, with_settings
from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidRequest
from paceline.core.output import Generation, StepOutput
from paceline.core.request import SamplingParams
from paceline.core.sequence import Origin
from paceline.gateway.config import ServerConfig
from paceline.model_files.tokenizer import TextStream, Tokenizer
from paceline.tools.bench import Summary
from paceline.tools.prompts import AnswerTimes, Arrival

if TYPE_CHECKING:
    from paceline.engine.start import LLM

HELP = "Type a message. /reset clears the conversation, /help shows this line, /exit exits, Ctrl-C stops an answer."
EXITS = ("/exit", "/quit")
CHAT_MAX_TOKENS = 512


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
        config, CHAT_MAX_TOKENS, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    with loaded(config.engine) as llm:
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
        parts.append(
            f"draft acceptance rate {summary.draft_acceptance_rate:.0%} ({summary.accepted} of {summary.drafted})"
        )
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


GENERATE_MAX_TOKENS = 128


@with_settings(ENGINE)
def generate(
    config: ServerConfig,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to complete; `-` or none reads standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.", metavar="FILE")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user message, through the chat template.")] = False,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Number of completions.")] = 1,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with text, tokens and statistics.")
    ] = False,
) -> None:
    """Complete a text from an argument, a file or standard input.

    Standard output receives only the completion.
    """
    text = read_prompt(prompt, file)
    sampling = sampling_params(
        config,
        GENERATE_MAX_TOKENS,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        n=n,
        stop=tuple(stop or ()),
    )
    with loaded(config.engine) as llm:
        if n == 1 and not json_output:
            _stream(llm, _messages(text) if chat else text, sampling)
            return
        clock = WallClock()
        started = clock.now()
        generation = llm.chat(_messages(text), sampling) if chat else llm.generate(text, sampling)[0]
        seconds = clock.now() - started
    if json_output:
        document = _to_json(config.engine.model, text, generation, seconds)
        sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")
    else:
        _write_texts(generation)


def _messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _stream(llm: "LLM", prompt: Any, sampling: SamplingParams) -> None:
    """Writes the text while it is generated."""
    for output in llm.stream(prompt, sampling):
        sys.stdout.write(output.text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _write_texts(generation: Generation) -> None:
    for completion in generation.completions:
        console.err.rule(f"{completion.index + 1} of {len(generation.completions)}", align="left")
        sys.stdout.write(completion.text + "\n")


def _to_json(model: str, prompt: str, generation: Generation, seconds: float) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "prompt_tokens": len(generation.prompt_token_ids),
        "seconds": seconds,
        "completions": [
            {
                "index": completion.index,
                "text": completion.text,
                "finish_reason": completion.finish_reason.value,
                "token_ids": completion.token_ids,
                "origins": [origin.value for origin in completion.origins],
                "speculative_decoding": asdict(completion.speculation),
            }
            for completion in generation.completions
        ],
    }


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file, or standard input."""
    if file is not None:
        if prompt is not None:
            raise InvalidRequest("give the prompt as an argument or in a file, not both", field="prompt")
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"cannot read the prompt in {file}: {error}", field="prompt") from error
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise InvalidRequest(
            "there is no prompt: give it as an argument, with --file, or on standard input", field="prompt"
        )
    return sys.stdin.read()


STYLES = {
    Origin.ACCEPTED: "green",
    Origin.RECOVERED: "yellow",
    Origin.BONUS: "cyan",
    Origin.PLAIN: "default",
}

MEANINGS = {
    Origin.ACCEPTED: "drafted and accepted",
    Origin.RECOVERED: "the target's token in place of a rejected draft",
    Origin.BONUS: "the target's token after a draft accepted whole",
    Origin.PLAIN: "decoded without a draft",
}


class Painter:
    """Colours one answer. The joined results of `paint` and `flush` are its text, unless a stop string cuts it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)
        self._eos_ids = tokenizer.eos_ids
        self._last = Origin.PLAIN

    def paint(self, output: StepOutput) -> Text:
        return Text.assemble(*self._pieces(output))

    def flush(self) -> Text:
        """Text held back because a character was incomplete."""
        return Text(self._stream.flush(), STYLES[self._last])

    def _pieces(self, output: StepOutput) -> Iterator[tuple[str, str]]:
        for token, origin in zip(output.tokens, output.origins, strict=True):
            if token not in self._eos_ids:
                self._last = origin
                yield self._stream.push(token), STYLES[origin]


def legend() -> Text:
    lines = (Text.assemble(("■ ", STYLES[o]), (f"{o.value:<10}", STYLES[o]), MEANINGS[o]) for o in Origin)
    return Text("\n").join(lines)
