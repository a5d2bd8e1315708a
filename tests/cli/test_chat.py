import io

import pytest
from rich.console import Console

from paceline.cli import console
from paceline.cli.chat import STYLES, Conversation, Painter, legend, speed_line
from paceline.core.clock import VirtualClock
from paceline.core.errors import InvalidRequest
from paceline.core.request import SamplingParams
from paceline.core.sequence import Origin
from paceline.tools.prompts.prompts import AnswerTimes, Arrival
from tests.cli.fakes import ANSWER, ScriptedLLM, word_tokenizer


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, color_system="standard", width=100, highlight=False)
    monkeypatch.setattr(console, "out", terminal)
    monkeypatch.setattr(console, "err", terminal)
    return written


def conversation(llm: ScriptedLLM) -> Conversation:
    return Conversation(llm, SamplingParams(), "be brief", VirtualClock())  # type: ignore[arg-type]


def test_token_colour_is_its_origin() -> None:
    painter = Painter(word_tokenizer())
    painter.paint(ANSWER[0])
    text = painter.paint(ANSWER[1])
    assert text.plain == " two three four"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        (" two", STYLES[Origin.ACCEPTED]),
        (" three", STYLES[Origin.ACCEPTED]),
        (" four", STYLES[Origin.BONUS]),
    ]
    assert painter.paint(ANSWER[2]).plain == " five"  # the end-of-turn token has no text
    assert painter.flush().plain == ""


def test_colours_differ_and_the_legend_lists_all() -> None:
    assert len(set(STYLES.values())) == len(Origin)
    assert all(origin.value in legend().plain for origin in Origin)


def test_conversation_grows_until_reset(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["hello", "", "more", "/what", "/reset", "anew", "/help", "/exit", "never"])
    monkeypatch.setattr(console.out, "input", lambda prompt: next(lines))
    llm = ScriptedLLM()
    conversation(llm).run()
    contents = [[message["content"] for message in messages] for messages in llm.prompts]
    assert contents == [
        ["be brief", "hello"],
        ["be brief", "hello", "one two three four five", "more"],
        ["be brief", "anew"],
    ]
    assert "\x1b[32m two" in screen.getvalue()
    assert "/what is not a command" in screen.getvalue()
    assert next(lines) == "never"


def test_ctrl_c_stops_the_answer_and_stores_its_text(screen: io.StringIO) -> None:
    llm = ScriptedLLM()
    talk = conversation(llm)
    llm.interrupt = 1
    talk.send("hello")
    assert llm.cancelled == 1
    assert talk.messages[-1]["content"] == "one"
    llm.interrupt = None
    talk.send("go on")
    assert talk.messages[-1]["content"] == "one two three four five"


def test_ctrl_c_and_the_end_of_input_at_the_prompt(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    events = iter([KeyboardInterrupt, EOFError])

    def read(prompt: str) -> str:
        raise next(events)

    monkeypatch.setattr(console.out, "input", read)
    conversation(ScriptedLLM()).run()
    assert "/exit exits" in screen.getvalue()


def test_rejected_message_is_not_stored(screen: io.StringIO) -> None:
    llm = ScriptedLLM()
    talk = conversation(llm)
    llm.error = InvalidRequest("the prompt has too many tokens")
    talk.send("hello")
    assert [message["role"] for message in talk.messages] == ["system"]
    assert "too many tokens. /reset" in screen.getvalue()


def test_speed_line() -> None:
    trace = AnswerTimes("chat", 0.0, (Arrival(0.5, 1), Arrival(0.75, 4, 4, 3), Arrival(1.0, 5, 4, 4)), "")
    assert speed_line(trace) == (
        "10 tokens · 10.0 tok/s · first after 500 ms · 4.50 tokens a round · draft acceptance rate 88% (7 of 8)"
    )
    assert speed_line(AnswerTimes("chat", 0.0, (Arrival(0.5, 1),), "")).endswith("no drafts")
