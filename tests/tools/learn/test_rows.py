from paceline.tools.train.further import categories, num_trained, to_text, windows
from tests.tools.learn.fakes import sample


def test_a_sample_is_one_row_and_only_its_output_is_trained_on() -> None:
    samples = [sample(1, prompt=8, output=12), sample(2, prompt=3, output=5)]
    text = to_text(samples, 32, 256)
    assert text.ids.shape == (2, 20)
    assert text.ids[0].tolist() == [*samples[0].prompt, *samples[0].output]
    assert text.ids[1, 8:].tolist() == [0] * 12
    assert text.answer[1].tolist() == [False] * 3 + [True] * 5 + [False] * 12
    assert num_trained(text) == 17
    assert text.kinds == ("0", "1")
    assert categories(samples, 32, 256) == ["chat", "chat"]


def test_a_long_sample_gives_rows_that_cover_its_output_once() -> None:
    one = sample(1, prompt=10, output=70)
    found = windows(one, 32)
    assert [len(ids) for ids, _ in found] == [16, 32, 32]
    covered = [token for ids, start in found for token in ids[start:]]
    assert len(covered) == 70 - 2  # the first token of a row without prompt has no context
    assert found[-1][0] == one.output[-32:]


def test_a_long_prompt_is_cut_at_its_start() -> None:
    one = sample(1, prompt=100, output=4)
    ((ids, start),) = windows(one, 32)
    assert ids == (*one.prompt[-28:], *one.output)
    assert start == 28


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    assert len(to_text([sample(1)], 32, 10)) == 0
    assert categories([sample(1)], 32, 10) == []
