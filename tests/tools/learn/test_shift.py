import random
from collections.abc import Sequence

from paceline.gateway.sessions.samples import LearningSample
from paceline.tools.learn.learner import ShiftLimits, has_shifted

LIMITS = ShiftLimits()


def outputs(count: int, vocabulary: Sequence[int], seed: int, size: int = 40) -> list[LearningSample]:
    draw = random.Random(seed)
    texts = [tuple(draw.choices(vocabulary, k=size)) for _ in range(count)]
    return [LearningSample(i, (1,), text, (), 0, 1, "tenant", "") for i, text in enumerate(texts, 1)]


def test_other_tokens_are_a_shift_and_the_same_ones_are_not() -> None:
    older = outputs(24, range(300), seed=1)
    assert not has_shifted(older, outputs(12, range(300), seed=2), LIMITS)
    assert has_shifted(older, outputs(12, range(200, 500), seed=3), LIMITS)


def test_a_part_of_the_older_tokens_is_no_shift() -> None:
    """A stream that becomes simpler needs no new draft sooner."""
    assert not has_shifted(outputs(24, range(300), seed=1), outputs(12, range(20), seed=2), LIMITS)


def test_few_samples_prove_nothing() -> None:
    older, newer = outputs(24, range(100), seed=1), outputs(7, range(100, 200), seed=2)
    assert not has_shifted(older, newer, LIMITS)
    assert has_shifted(older, newer, ShiftLimits(min_samples=7))
    assert not has_shifted((), newer, LIMITS)


def test_a_small_difference_is_no_shift_however_certain_it_is() -> None:
    older, newer = outputs(400, range(100), seed=1), outputs(400, range(95), seed=2)
    changed = [LearningSample(one.number, one.prompt, (*one.output, 1000), (), 0, 1, one.tenant, "") for one in newer]
    assert not has_shifted(older, changed, LIMITS)
