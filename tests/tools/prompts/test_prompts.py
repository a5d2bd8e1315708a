from pathlib import Path

import pytest

from paceline.core.errors import InvalidRequest
from paceline.core.request import SamplingParams
from paceline.tools.prompts.prompts import DEFAULT_PROMPTS, PRESETS, BenchPrompt, find_preset, load_prompts, select


def test_formats_of_training_are_supported(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    messages = (
        '[{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}]'
    )
    file.write_text('{"question": "why?"}\n{"messages": ' + messages + "}\n")
    assert load_prompts(file) == [BenchPrompt(("why?",)), BenchPrompt(("a", "b"))]


def test_formats_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "one", "category": "code", "id": 3}\n\n{"turns": ["a", "b"], "category": "chat"}\n{"prompt": "x"}\n'
    )
    assert load_prompts(file) == [BenchPrompt(("one",), "code"), BenchPrompt(("a", "b"), "chat"), BenchPrompt(("x",))]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "prompts.jsonl:1 is not JSON"),
        ('{"prompt": "a"}\n{"text": "b"}', r"prompts.jsonl:2 needs `prompt`"),
        ('{"turns": []}', "needs `prompt`"),
        ('["a"]', "needs `prompt`"),
        ('{"messages": ["a"]}', "needs `prompt`"),
        ('{"messages": [{"role": "user"}]}', "needs `prompt`"),
        ("\n", "holds no prompts"),
    ],
)
def test_invalid_files_are_rejected_by_line(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidRequest, match=complaint):
        load_prompts(file)


def test_missing_file_is_an_invalid_request(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        load_prompts(tmp_path / "none.jsonl")


def test_limit_takes_from_all_categories_in_turn() -> None:
    prompts = [BenchPrompt((str(i),), category) for i, category in enumerate("aaabbc")]
    assert [p.turns[0] for p in select(prompts, limit=4)] == ["0", "1", "3", "5"]
    assert [p.turns[0] for p in select(prompts, ["a"], limit=2)] == ["0", "1"]
    assert select(prompts, limit=99) == prompts
    with pytest.raises(InvalidRequest, match="there are: a, b, c"):
        select(prompts, ["d"])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid(name: str) -> None:
    preset = find_preset(name)
    assert select(DEFAULT_PROMPTS, preset.categories)
    SamplingParams(**preset.sampling, max_tokens=preset.tokens)


def test_every_built_in_category_is_in_a_preset() -> None:
    named = {category for preset in PRESETS.values() for category in preset.categories or ()}
    assert named == {prompt.category for prompt in DEFAULT_PROMPTS}


def test_unknown_preset_error_lists_all() -> None:
    with pytest.raises(InvalidRequest, match="support-chat"):
        find_preset("chat")
