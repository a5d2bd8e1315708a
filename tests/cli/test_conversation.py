"""A conversation with a scripted server: what is sent, kept and shown."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.cli import console, conversation
from paceline.cli.conversation import AnswerFigures, Conversation, legend, read_messages
from paceline.core.errors import InvalidRequest
from paceline.core.sequence import Origin


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, color_system="standard", width=100, highlight=False)
    monkeypatch.setattr(console, "out", terminal)
    monkeypatch.setattr(console, "err", terminal)
    return written


class ScriptedServer:
    """Answers every request with "one two". `interrupt` raises KeyboardInterrupt after the first chunk."""

    url = "http://127.0.0.1:1"

    def __init__(self, has_template: bool = True) -> None:
        self.has_template, self.interrupt = has_template, False
        self.error: Exception | None = None
        self.bodies: list[tuple[str, dict[str, Any]]] = []

    def get(self, path: str) -> Any:
        assert path == "/v1/models"
        return {"data": [{"id": "tiny", "root": "/models/tiny.gguf", "has_chat_template": self.has_template}]}

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append((path, json.loads(json.dumps(body))))
        if self.error is not None:
            raise self.error
        for text, origin in (("one", "plain"), (" two", "accepted")):
            choice = {"delta": {"content": text}} if self.has_template else {"text": text}
            yield {"choices": [{**choice, "origins": [{"text": text, "origin": origin}]}]}
            if self.interrupt:
                raise KeyboardInterrupt
        counts = {"num_draft_tokens": 4, "num_accepted_draft_tokens": 3}
        yield {"choices": [], "usage": {"completion_tokens": 2}, "metrics": {"speculative_decoding": counts}}


def talk(server: ScriptedServer, *lines: str, **options: Any) -> Conversation:
    made = Conversation.of(server, "/models/tiny.gguf", options.pop("system", None), options, False)  # type: ignore[arg-type]
    made.run(iter(lines))
    return made


def test_a_conversation_grows_until_reset(screen: io.StringIO) -> None:
    server = ScriptedServer()
    talk(server, "hello", "more", "/reset", "anew", "/bye", "never", system="be brief", temperature=0.0)
    contents = [[message["content"] for message in body["messages"]] for _, body in server.bodies]
    assert contents == [["be brief", "hello"], ["be brief", "hello", "one two", "more"], ["be brief", "anew"]]
    assert {path for path, _ in server.bodies} == {"/v1/chat/completions"}
    assert server.bodies[0][1]["model"] == "tiny"
    assert server.bodies[0][1]["temperature"] == 0.0
    assert "3 of 4 drafts accepted (75%)" in screen.getvalue()


def test_a_model_without_a_template_continues_texts(screen: io.StringIO) -> None:
    server = ScriptedServer(has_template=False)
    made = talk(server, "Once", "upon")
    made.welcome()
    assert [(path, body["prompt"]) for path, body in server.bodies] == [
        ("/v1/completions", "Once"),
        ("/v1/completions", "upon"),
    ]
    assert "it continues your text" in screen.getvalue()


def test_settings_and_instructions(screen: io.StringIO) -> None:
    server = ScriptedServer()
    talk(server, "/set temperature 0.5", "/set speculation off", "/system be kind", "hello", "/set")
    body = server.bodies[0][1]
    assert (body["temperature"], body["speculation"]) == (0.5, {"enabled": False})
    assert body["messages"][0] == {"role": "system", "content": "be kind"}
    assert "temperature 0.5" in screen.getvalue()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sytem x", "there is no /sytem: did you mean /system?"),
        ("/set temprature 1", "there is no setting 'temprature': did you mean temperature?"),
        ("/set temperature hot", "temperature is a number, not 'hot'"),
        ("/set colors red", "colors is on or off"),
        ("/save", "name the file"),
        ("/save /nowhere/at/all", "cannot write /nowhere/at/all"),
    ],
)
def test_wrong_commands_say_what_is_right(screen: io.StringIO, line: str, words: str) -> None:
    server = ScriptedServer()
    talk(server, line)
    assert words in screen.getvalue()
    assert not server.bodies


def test_save_writes_the_messages(screen: io.StringIO, tmp_path: Path) -> None:
    talk(ScriptedServer(), "hello", f"/save {tmp_path / 'talk.json'}", "/help")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [message["content"] for message in saved["messages"]] == ["hello", "one two"]
    assert "/system TEXT" in screen.getvalue()


def test_ctrl_c_stops_the_answer_and_keeps_its_text(screen: io.StringIO) -> None:
    server = ScriptedServer()
    made = talk(server)
    server.interrupt = True
    made.send("hello")
    assert made.messages[-1]["content"] == "one"
    assert "[stopped]" in screen.getvalue()
    server.interrupt = False
    made.send("go on")
    assert made.messages[-1]["content"] == "one two"


def test_a_refused_message_is_not_kept(screen: io.StringIO) -> None:
    server = ScriptedServer()
    server.error = InvalidRequest("the prompt has too many tokens")
    made = talk(server, "hello")
    assert made.messages == []
    assert "too many tokens. /reset" in screen.getvalue()
    with pytest.raises(InvalidRequest):
        made.send("hello", with_figures=False)


def test_colours_show_origins_on_demand(screen: io.StringIO) -> None:
    talk(ScriptedServer(), "hello")
    assert "\x1b[32mtwo" not in screen.getvalue()
    talk(ScriptedServer(), "/set colors on", "hello")
    assert "\x1b[32mtwo" in screen.getvalue()
    assert all(origin.value in legend().plain for origin in Origin)


def test_the_line_after_an_answer() -> None:
    assert AnswerFigures(1.0, 1.5, 3.5, 9).line() == "9 tokens · first after 0.5 s · 4.0 tok/s"
    assert AnswerFigures(1.0).line() == "no answer"


def test_messages_of_several_lines_and_the_ends_of_input(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    typed: list[Any] = [" hello ", '"""a', "b", 'c"""', "one \\", "two", "", KeyboardInterrupt, "last", EOFError]

    def read(prompt: str) -> str:
        line = typed.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(conversation, "input", read, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(read_messages()) == ["hello", "a\nb\nc", "one \ntwo", "last"]
    assert "Ctrl-D or /bye leaves" in screen.getvalue()
