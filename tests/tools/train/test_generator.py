import itertools

import pytest
import torch

from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.tools.train import generator as module
from paceline.tools.train.corpus import (
    ANSWER_TOKENS,
    GENERATE,
    NO_END,
    Corpus,
    Script,
    TrainingPrompt,
    TurnTokens,
    turn_tokens,
)
from paceline.tools.train.evaluate import answers
from paceline.tools.train.generator import TextGenerator
from paceline.tools.train.target import Target
from tests.tools.train.tiny import END, START, save_tiny


@pytest.fixture(scope="module")
def turns(tokenizer: Tokenizer) -> TurnTokens:
    return turn_tokens(tokenizer)


def scripts(turns: TurnTokens, count: int) -> list[Script]:
    """Prompts of different lengths, one of them with a part that the target generates."""
    whole = [Script("prompt", (*turns.opening, *range(40, 44 + i), END)) for i in range(count - 1)]
    return [*whole, Script("start", (*turns.opening, 50, NO_END, NO_END, NO_END, NO_END, 51, END))]


def test_turn_tokens_come_from_the_template(turns: TurnTokens, tokenizer: Tokenizer) -> None:
    letters = {name: tokenizer.encode(name, add_special=False)[0] for name in "ua"}
    assert turns == TurnTokens((START, letters["u"]), (END, START, letters["a"]), (START, letters["u"]), (END,), True)


def test_base_model_generates_text_after_text(target: Target) -> None:
    turns = TurnTokens((START,), (), (START,), (END,), is_chat=False)
    generated = TextGenerator(target, turns, 4, 100, 0).generate([Script("text", (START,))] * 4, torch.full((4,), 2.0))
    assert (generated.ids[:, 0] == START).all()
    assert generated.answer[:, 1:].sum() > 300
    for row in generated.ids.tolist():
        for token, following in itertools.pairwise(row):
            assert token != END or following == START


def test_scripts_are_followed_and_no_end_entries_end_no_turn(target: Target, turns: TurnTokens) -> None:
    rows = scripts(turns, 6)
    generated = TextGenerator(target, turns, 6, 60, 0).generate(rows, torch.zeros(6))
    for row, script in enumerate(rows):
        for place, (wanted, found) in enumerate(zip(script.ids, generated.ids[row].tolist(), strict=False)):
            assert found == wanted if wanted >= 0 else found != END
            assert not generated.answer[row, place]
        after = len(script.ids)
        assert tuple(generated.ids[row, after : after + 2].tolist()) == turns.to_answer[1:]
        assert not generated.answer[row, after : after + 2].any()
        assert generated.answer[row, after + 2]


def test_greedy_answers_match_the_target(target: Target, turns: TurnTokens) -> None:
    generated = TextGenerator(target, turns, 6, 150, 0).generate(scripts(turns, 6), torch.zeros(6))
    best = (target.states(generated.ids.long()).last @ target.head.T).argmax(-1)  # [B, S]
    compared = 0
    for row in range(6):
        for start, end in answers(generated.answer[row]):
            cut = (end - start) >= module.ANSWER_LIMIT
            assert generated.ids[row, start : end - cut].tolist() == best[row, start - 1 : end - 1 - cut].tolist()
            compared += end - start
    assert compared > 200


def test_long_turns_are_ended(target: Target, turns: TurnTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "USER_LIMIT", 7)
    generated = TextGenerator(target, turns, 6, 150, 0, answer_limit=12).generate(scripts(turns, 6), torch.zeros(6))
    lengths = [end - start for row in generated.answer for start, end in answers(row)]
    assert max(lengths) == 13  # the end included
    # User turns and answers alternate, with the template's tokens between.
    row, place = generated.ids[0].tolist(), len(turns.opening)
    turn_ends = [i for i in range(place, 145) if row[i] == END]
    assert len(turn_ends) > 8
    for number, end in enumerate(turn_ends):
        expected = turns.to_answer[1:] if number % 2 == 0 else turns.to_user
        assert tuple(row[end + 1 : end + 1 + len(expected)]) == expected


def test_script_continues_after_every_answer(target: Target, turns: TurnTokens) -> None:
    prompts = [(60, 61, 62, END), (70, 71, END), (80, END)]
    joined = [token for prompt in prompts for token in (*prompt, GENERATE)]
    script = Script("prompts", (*turns.opening, *joined))
    generated = TextGenerator(target, turns, 2, 260, 0, answer_limit=9).generate([script] * 2, torch.zeros(2))
    for row, answer in zip(generated.ids.tolist(), generated.answer, strict=True):
        place = len(turns.opening)
        found = list(answers(answer))
        assert len(found) > len(prompts)  # afterwards the target generates user turns
        for prompt, (start, end) in zip(prompts, found, strict=False):
            assert row[place : start - 2] == list(prompt)
            assert tuple(row[start - 2 : start]) == turns.to_answer[1:]
            assert row[end - 1] == END
            assert tuple(row[end : end + len(turns.to_user)]) == turns.to_user
            place = end + len(turns.to_user)


def test_sampling_depends_on_temperature_and_seed(target: Target, turns: TurnTokens) -> None:
    rows = [scripts(turns, 2)[0]] * 64
    warm = [TextGenerator(target, turns, 64, 12, seed).generate(rows, torch.ones(64)).ids for seed in (1, 1, 2)]
    assert torch.equal(warm[0], warm[1])
    assert not torch.equal(warm[0], warm[2])
    # The first answer token over many rows has the target's distribution.
    many = TextGenerator(target, turns, 2048, 10, 4).generate(rows[:1] * 2048, torch.ones(2048)).ids
    first = len(rows[0].ids) + 2
    drawn = many[:, first]
    p = (target.states(many[:1, :first].long()).last[0, -1] @ target.head.T).softmax(-1)
    found = torch.bincount(drawn.long(), minlength=len(p)) / len(drawn)
    assert 0.5 * (p - found).abs().sum() < 0.12
    cold = TextGenerator(target, turns, 64, 30, 3).generate(rows, torch.zeros(64))
    firsts = cold.ids[:, first]
    assert (firsts == firsts[0]).all()


def test_corpus_scripts_end_the_turn_by_kind(tokenizer: Tokenizer, turns: TurnTokens) -> None:
    corpus = Corpus(tokenizer, turns, [TrainingPrompt("hello", "own")], 0.3)
    taken = list(itertools.islice(corpus.scripts(5), 400))
    assert taken == list(itertools.islice(corpus.scripts(5), 400))
    share = sum(script.kind == "own" for script in taken) / 400
    assert 0.2 < share < 0.4
    kinds = {script.kind for script in taken}
    assert {"own", "chat", "qa", "rag", "summarization", "translation", "coding"} <= kinds
    for script in taken:
        assert script.ids[: len(turns.opening)] == turns.opening
        assert GENERATE not in script.ids
        assert (script.ids[-1] == END) == (script.kind in ("own", "summarization", "translation"))
    assert corpus.script_for(TrainingPrompt("hi", "x")).ids[-3:] == (*tokenizer.encode("hi", add_special=False), END)


def test_rows_hold_as_many_prompts_as_fit(tokenizer: Tokenizer, turns: TurnTokens) -> None:
    short, long = TrainingPrompt("x" * 20, "short"), TrainingPrompt("y" * 900, "long")
    taken = list(itertools.islice(Corpus(tokenizer, turns, [short, long], 1.0, length=1024).scripts(0), 50))
    for script in taken:
        count = 1 + script.ids.count(GENERATE)
        assert script.kind == ("long" if ord("y") - 33 in script.ids else "short")
        assert count == (1 if script.kind == "long" else min(count, 6))
        assert len(script.ids) + count * ANSWER_TOKENS <= 1024 or count == 1
    assert max(script.ids.count(GENERATE) for script in taken) >= 3


def test_tokenizer_without_template_has_no_turns(tmp_path_factory: pytest.TempPathFactory) -> None:
    from paceline.models.loading.load import open_checkpoint

    plain = open_checkpoint(save_tiny(tmp_path_factory.mktemp("plain"), template=None)).read_tokenizer()
    assert turn_tokens(plain) == TurnTokens((END,), (), (END,), (END,), False)
