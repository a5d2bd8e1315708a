"""Expected rest of a text, from the texts that have ended."""

from paceline.vllm.decisions import FEW, KEPT, OutputLengths


def test_few_texts_say_nothing() -> None:
    lengths = OutputLengths()
    for _ in range(FEW - 1):
        lengths.add(96)
    assert lengths.remaining(10) is None
    lengths.add(96)
    assert lengths.remaining(10) == 86


def test_only_longer_texts_count() -> None:
    lengths = OutputLengths()
    for length in [10] * 6 + [100, 200]:
        lengths.add(length)
    assert lengths.remaining(5) == 40
    assert lengths.remaining(50) == 100
    assert lengths.remaining(199) == 1


def test_a_text_longer_than_all_may_end_with_the_next_token() -> None:
    lengths = OutputLengths()
    for _ in range(FEW):
        lengths.add(96)
    assert lengths.remaining(96) == lengths.remaining(500) == 1


def test_old_texts_are_forgotten() -> None:
    lengths = OutputLengths()
    for length in [1000] * KEPT + [20] * KEPT:
        lengths.add(length)
    assert lengths.remaining(0) == 20
