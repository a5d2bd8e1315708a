import json
from pathlib import Path

import pytest

from paceline.core.errors import InvalidRequest
from paceline.train.corpus import HELD_OUT_EVERY, Prompt, read_prompts, split


def test_prompts_of_every_shape(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}, {"role": "user", "content": "e"}]
    lines = [
        {"prompt": "a"},
        {"question": "b", "category": "maths"},
        {"turns": ["c", "later"]},
        {"messages": messages},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_prompts(path) == [Prompt("a", "log"), Prompt("b", "maths"), Prompt("c", "log"), Prompt("d", "log")]


@pytest.mark.parametrize("line", ["{", "[]", '{"answer": "x"}', '{"turns": []}', '{"prompt": 3}'])
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(InvalidRequest, match=r"log\.jsonl:2"):
        read_prompts(path)


def test_no_prompts_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(InvalidRequest):
            read_prompts(tmp_path / name)


def test_the_split_is_whole_and_does_not_overlap() -> None:
    prompts = [Prompt(str(i), "x") for i in range(100)]
    train, held = split(prompts)
    assert sorted(train + held, key=lambda p: int(p.text)) == prompts
    assert len(held) == 100 // HELD_OUT_EVERY
