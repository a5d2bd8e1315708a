"""A conversation in the terminal: messages, commands that begin with a slash, and streamed answers."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.text import Text

from paceline.cli import console
from paceline.cli.word_writer import WordWriter
from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.sequence import Origin
from paceline.gateway import ServerClient

QUOTES = '"""'
HELP = """\
/system TEXT     give instructions for the next answers
/set NAME VALUE  temperature, top_p, top_k, max_tokens, seed,
                 speculation on|off, colors on|off
/save FILE       write the conversation as JSON
/reset           forget the conversation
/help            this page
/bye             leave, as Ctrl-D does
Ctrl-C stops an answer. \""" begins and ends several lines."""
COMMANDS = ("system", "set", "save", "reset", "help", "bye", "exit", "quit")
NUMBERS: dict[str, type] = {"temperature": float, "top_p": float, "top_k": int, "max_tokens": int, "seed": int}
SWITCHES = ("speculation", "colors")
STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "plain": "default"}
MEANINGS = {
    Origin.ACCEPTED: "drafted and accepted",
    Origin.RECOVERED: "the target's token in place of a rejected draft",
    Origin.BONUS: "the target's token after a draft accepted whole",
    Origin.PLAIN: "decoded without a draft",
}


@dataclass(slots=True)
class AnswerFigures:
    """What the line after an answer says."""

    started: float
    first: float | None = None
    """Time of the first text."""
    last: float = 0.0
    num_tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def line(self) -> str:
        if self.first is None:
            return "no answer"
        parts = [f"{self.num_tokens} tokens", f"first after {self.first - self.started:.1f} s"]
        if self.num_tokens > 1 and self.last > self.first:
            parts.append(f"{(self.num_tokens - 1) / (self.last - self.first):.1f} tok/s")
        if self.drafted:
            parts.append(f"{self.accepted} of {self.drafted} drafts accepted ({self.accepted / self.drafted:.0%})")
        return " · ".join(parts)


@dataclass(slots=True)
class Conversation:
    """The messages of one conversation with a model that has a chat template; otherwise each message is a text to continue."""

    client: ServerClient
    model: str
    has_template: bool
    options: dict[str, Any]
    """Fields of every request, such as `temperature`."""
    system: str | None = None
    has_colors: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def of(
        cls, client: ServerClient, model: str, system: str | None, options: dict[str, Any], has_colors: bool
    ) -> "Conversation":
        """A conversation with the model of this name, or with the only model of the server."""
        cards = client.get("/v1/models")["data"]
        card = next((card for card in cards if model in (card["id"], card["root"])), cards[0])
        return cls(client, card["id"], card.get("has_chat_template", True), options, system, has_colors)

    def welcome(self) -> None:
        console.out.print(Text.assemble((self.model, "bold"), (f" at {self.client.url}  /help lists commands", "dim")))
        if not self.has_template:
            console.out.print("This model has no chat template: it continues your text.", style="dim")
        if self.has_colors:
            console.out.print(legend())

    def run(self, lines: Iterator[str]) -> None:
        for line in lines:
            name, _, rest = line.removeprefix("/").partition(" ")
            if not line.startswith("/"):
                self.send(line)
            elif name in ("bye", "exit", "quit"):
                return
            else:
                try:
                    self._command(name, rest.strip())
                except PacelineError as error:
                    console.fail(str(error))

    def send(self, text: str, with_figures: bool = True) -> None:
        """Streams the answer to a message, and keeps the two. An answer that was stopped is kept as far as it is shown."""
        question = {"role": "user", "content": text}
        figures = AnswerFigures(time.perf_counter())
        try:
            answer = self._stream(self._body(question), figures)
        except PacelineError as error:
            if not with_figures:
                raise
            console.fail(f"{error}. /reset starts a new conversation.")
            return
        self.messages += [question, {"role": "assistant", "content": answer}]
        if with_figures:
            console.out.print(figures.line(), style="dim", highlight=False)

    def _body(self, question: dict[str, str]) -> dict[str, Any]:
        start = [{"role": "system", "content": self.system}] if self.system else []
        prompt = (
            {"messages": [*start, *self.messages, question]}
            if self.has_template
            else {"prompt": question["content"], "max_tokens": 256}
        )
        shown = {"include_usage": True, "include_origins": True}
        return {"model": self.model, "stream": True, "stream_options": shown, **prompt, **self.options}

    def _stream(self, body: dict[str, Any], figures: AnswerFigures) -> str:
        """The text of the answer, which is shown while it arrives."""
        writer, answer = WordWriter(console.out), ""
        events = self.client.stream("/v1/chat/completions" if self.has_template else "/v1/completions", body)
        waiting = console.err.status("reading the message")
        waiting.start()
        try:
            for event in events:
                if "error" in event:
                    raise InvalidRequest(event["error"]["message"])
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    thought, text = delta.get("reasoning") or "", delta.get("content") or choice.get("text") or ""
                    if thought or text:
                        waiting.stop()
                        figures.last = time.perf_counter()
                        figures.first = figures.first or figures.last
                    if thought:
                        writer.write(thought, "dim italic")
                    if text and self.has_colors and "origins" in choice:
                        for piece in choice["origins"]:
                            writer.write(piece["text"], STYLES[piece["origin"]])
                    elif text:
                        writer.write(text)
                    answer += text
                usage, metrics = event.get("usage") or {}, event.get("metrics") or {}
                figures.num_tokens = usage.get("completion_tokens", figures.num_tokens)
                counts = metrics.get("speculative_decoding") or {}
                figures.drafted = counts.get("num_draft_tokens", figures.drafted)
                figures.accepted = counts.get("num_accepted_draft_tokens", figures.accepted)
        except KeyboardInterrupt:
            waiting.stop()
            writer.write(" [stopped]", "dim")
        finally:
            waiting.stop()
            with suppress(AttributeError):  # not a generator
                events.close()  # type: ignore[attr-defined]
            writer.end()
        return answer

    def _command(self, name: str, rest: str) -> None:
        if name == "help":
            console.out.print(HELP, markup=False, highlight=False)
        elif name == "reset":
            self.messages = []
            console.out.print("The conversation is forgotten.", style="dim")
        elif name == "system":
            self.system = rest or None
            console.out.print("Instructions are set." if rest else "There are no instructions now.", style="dim")
        elif name == "save":
            self._save(rest)
        elif name == "set":
            self._set(*rest.partition(" ")[::2])
        else:
            nearest = get_close_matches(name, COMMANDS, n=1)
            advice = f"did you mean /{nearest[0]}?" if nearest else "/help lists the commands"
            raise InvalidRequest(f"there is no /{name}: {advice}")

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidRequest("name the file: /save FILE")
        start = [{"role": "system", "content": self.system}] if self.system else []
        document = {"model": self.model, "messages": [*start, *self.messages]}
        try:
            Path(name).expanduser().write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise InvalidRequest(f"cannot write {name}: {error.strerror}") from None
        console.out.print(f"Wrote {name}.", style="dim", markup=False)

    def _set(self, name: str, value: str) -> None:
        if not name:
            shown = {"colors": "on" if self.has_colors else "off", **self.options}
            console.out.print(", ".join(f"{key} {text}" for key, text in shown.items()), style="dim", markup=False)
            return
        if name in SWITCHES:
            if value not in ("on", "off"):
                raise InvalidRequest(f"{name} is on or off, not {value!r}")
            if name == "colors":
                self.has_colors = value == "on"
            else:
                self.options["speculation"] = {"enabled": value == "on"}
        elif name in NUMBERS:
            try:
                self.options[name] = NUMBERS[name](value)
            except ValueError:
                raise InvalidRequest(f"{name} is a number, not {value!r}") from None
        else:
            nearest = get_close_matches(name, (*NUMBERS, *SWITCHES), n=1)
            names = f"did you mean {nearest[0]}?" if nearest else ", ".join((*NUMBERS, *SWITCHES))
            raise InvalidRequest(f"there is no setting {name!r}: {names}")
        console.out.print(f"{name} is {value}.", style="dim", markup=False)


def legend() -> Text:
    lines = (Text.assemble(("■ ", STYLES[o.value]), (f"{o.value:<10}", STYLES[o.value]), MEANINGS[o]) for o in Origin)
    return Text("\n").join(lines)


def read_messages() -> Iterator[str]:
    """Messages typed at the terminal, with editing and history, until the end of the input."""
    import readline  # gives `input` its editing

    history = Path.home() / ".local" / "state" / "paceline" / "history"
    with suppress(OSError):
        readline.read_history_file(history)
    try:
        while True:
            try:
                message = _read_message()
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                console.out.print("Ctrl-D or /bye leaves.", style="dim")
                continue
            except EOFError:
                sys.stdout.write("\n")
                return
            if message:
                yield message
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.set_history_length(1000)
            readline.write_history_file(history)


def _read_message() -> str:
    """One message. Three quotes at its beginning hold lines together, as does a backslash at the end of a line."""
    text = input(">>> ")
    if text.lstrip().startswith(QUOTES):
        text = text.lstrip().removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + input("... ")
        return text.rstrip().removesuffix(QUOTES).strip("\n")
    while text.endswith("\\"):
        text = text[:-1] + "\n" + input("... ")
    return text.strip()
