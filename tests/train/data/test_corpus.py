import json
from pathlib import Path

import pytest

from paceline.core.errors import InvalidRequest
from paceline.models.tokenizer.chat_template import ChatTemplate
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.train.data.corpus import HELD_OUT_EVERY, Prompt, read_prompts, split
from paceline.train.data.request_log import RequestLog
from paceline.train.data.turns import turns_of


@pytest.fixture(scope="module")
def log(tokenizer: Tokenizer) -> RequestLog:
    return RequestLog(tokenizer, turns_of(tokenizer))


def test_prompts_of_every_shape(log: RequestLog, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}, {"role": "user", "content": "e"}]
    lines = [
        {"prompt": "a"},
        {"question": "b", "category": "maths"},
        {"turns": ["c", "later"]},
        {"messages": messages},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    found = read_prompts(path, log)
    assert found == [Prompt("a", "log"), Prompt("b", "maths"), Prompt("c", "log"), Prompt("d", "log")]


def test_the_log_of_a_server(tokenizer: Tokenizer, log: RequestLog, tmp_path: Path) -> None:
    chat = ChatTemplate.of(tokenizer).render(
        [
            {"role": "user", "content": "why?"},
            {"role": "assistant", "content": "so"},
            {"role": "user", "content": "but"},
        ]
    )
    other = {"time": "t", "level": "info", "logger": "paceline.server", "message": "serving"}
    lines = [
        other,
        other | {"message": "generated", "category": "chat", "prompt": [chat], "answer": ["so"]},
        other | {"message": "generated", "prompt": ["not a chat"]},
    ]
    path = tmp_path / "server.log"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_prompts(path, log) == [Prompt("why?", "chat"), Prompt("not a chat", "server")]
    path.write_text(json.dumps(other))
    with pytest.raises(InvalidRequest, match="log_requests: text"):
        read_prompts(path, log)


@pytest.mark.parametrize("line", ["{", "[]", '{"answer": "x"}', '{"turns": []}', '{"prompt": 3}'])
def test_a_bad_line_is_named(line: str, log: RequestLog, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(InvalidRequest, match=r"log\.jsonl:2"):
        read_prompts(path, log)


def test_no_prompts_at_all(log: RequestLog, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(InvalidRequest):
            read_prompts(tmp_path / name, log)


def test_the_split_is_whole_and_does_not_overlap() -> None:
    prompts = [Prompt(str(i), "x") for i in range(100)]
    train, held = split(prompts)
    assert sorted(train + held, key=lambda p: int(p.text)) == prompts
    assert len(held) == 100 // HELD_OUT_EVERY


def test_what_is_asked_again_is_not_on_both_sides() -> None:
    train, held = split([Prompt(str(i % 20), "x") for i in range(200)])
    assert len(train) + len(held) == 20
    assert not {p.text for p in train} & {p.text for p in held}
