import json
from pathlib import Path

import pytest

from paceline.core.errors import InvalidRequest
from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.tools.train.corpus import HELD_OUT_EVERY, RequestLog, TrainingPrompt, read_prompts, split, turn_tokens


@pytest.fixture(scope="module")
def log(tokenizer: Tokenizer) -> RequestLog:
    return RequestLog(tokenizer, turn_tokens(tokenizer))


def test_prompts_of_every_format(log: RequestLog, tmp_path: Path) -> None:
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
    assert found == [
        TrainingPrompt("a", "log"),
        TrainingPrompt("b", "maths"),
        TrainingPrompt("c", "log"),
        TrainingPrompt("d", "log"),
    ]


def test_line_separators_inside_a_prompt_end_no_line(log: RequestLog, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"prompt": "one\u2028two\x85three"}, ensure_ascii=False), "utf-8")
    assert read_prompts(tmp_path / "log.jsonl", log) == [TrainingPrompt("one\u2028two\x85three", "log")]


def test_prompts_from_a_server_log(tokenizer: Tokenizer, log: RequestLog, tmp_path: Path) -> None:
    chat = ChatTemplate.of(tokenizer).render(
        [
            {"role": "user", "content": "why?"},
            {"role": "assistant", "content": "so"},
            {"role": "user", "content": "but"},
        ]
    )
    other = {"time": "t", "level": "info", "logger": "paceline.gateway", "message": "serving"}
    lines = [
        other,
        other | {"message": "generated", "category": "chat", "prompt": [chat], "answer": ["so"]},
        other | {"message": "generated", "prompt": ["not a chat"]},
    ]
    path = tmp_path / "server.log"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_prompts(path, log) == [TrainingPrompt("why?", "chat"), TrainingPrompt("not a chat", "server")]
    path.write_text(json.dumps(other))
    with pytest.raises(InvalidRequest, match="log_requests: text"):
        read_prompts(path, log)


@pytest.mark.parametrize("line", ["{", "[]", '{"answer": "x"}', '{"turns": []}', '{"prompt": 3}'])
def test_invalid_line_error_has_its_number(line: str, log: RequestLog, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(InvalidRequest, match=r"log\.jsonl:2"):
        read_prompts(path, log)


def test_file_without_prompts(log: RequestLog, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(InvalidRequest):
            read_prompts(tmp_path / name, log)


def test_split_is_complete_and_disjoint() -> None:
    prompts = [TrainingPrompt(str(i), "x") for i in range(100)]
    train, held = split(prompts)
    assert sorted(train + held, key=lambda p: int(p.text)) == prompts
    assert len(held) == 100 // HELD_OUT_EVERY


def test_duplicates_are_not_in_both_parts() -> None:
    train, held = split([TrainingPrompt(str(i % 20), "x") for i in range(200)])
    assert len(train) + len(held) == 20
    assert not {p.text for p in train} & {p.text for p in held}
