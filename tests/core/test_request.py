import pytest

from paceline.core.request import Categories, Request, SamplingParams, ValidatedRequest, draw_seed


def test_a_validated_request_keeps_the_seed_of_the_request() -> None:
    request = Request("r", (1, 2), SamplingParams(seed=7, n=2), priority=3, committed=((5,), None))
    validated = ValidatedRequest.of(request)
    assert validated.seed == validated.sampling.seed == 7
    assert (validated.id, validated.prompt_ids, validated.priority) == ("r", (1, 2), 3)
    assert validated.unfinished == (0,)


def test_a_validated_request_without_a_seed_draws_one() -> None:
    first, second = (ValidatedRequest.of(Request("r", (1,))) for _ in range(2))
    assert first.seed != second.seed
    assert ValidatedRequest.of(first).seed == first.seed


def test_a_validated_request_cannot_lack_a_seed() -> None:
    with pytest.raises(AssertionError, match="draws the seed"):
        ValidatedRequest("r", (1,))


def test_a_drawn_seed_is_in_range() -> None:
    assert all(0 <= draw_seed() < 2**63 for _ in range(100))


def test_categories_beyond_the_limit_fold_to_other() -> None:
    categories = Categories(limit=2)
    assert [categories.fold(name) for name in ("a", "b", "a", "c", "d", "b")] == ["a", "b", "a", "other", "other", "b"]


def test_one_owner_does_not_take_the_categories_of_others() -> None:
    categories = Categories(limit=6, owner_limit=2)
    assert [categories.fold(f"a{i}", "a") for i in range(4)] == ["a0", "a1", "other", "other"]
    assert categories.fold("b0", "b") == "b0"
    assert categories.fold("a0", "b") == "a0"
