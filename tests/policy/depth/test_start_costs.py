"""The costs of starting to draft: draft prefill and switch-on."""

from typing import Any

import pytest

from paceline.policy.depth.observation import DepthCandidate, DraftingObservation, RoundObservation, StepObservation
from paceline.policy.depth.start_cost import HORIZON, DraftPrefillCost, SwitchOnCost
from tests.traffic import traffic_class

# --- draft prefill


def drafting_step(*drafted: int, prefill: tuple[int, float] = (0, 0.0), method: str = "draft") -> StepObservation:
    """A step in which these sequences had drafts."""
    rounds = tuple(RoundObservation(i, traffic_class(f"{method}/chat"), 1, 0, 1) for i in drafted)
    drafting = (DraftingObservation(method, 1, 0.001, *prefill),) if drafted else ()
    return StepObservation(8, 8 + len(drafted), 0, drafting, 0.01, 0.0, rounds)


def after(*steps: StepObservation) -> DraftPrefillCost:
    cost = DraftPrefillCost()
    for one in steps:
        cost.observe(one)
    return cost


def candidate(
    number: int, num_tokens: int = 300, remaining: int | None = None, traffic: str = "draft/chat"
) -> DepthCandidate:
    return DepthCandidate(number, traffic_class(traffic), 8, num_tokens, remaining)


PREFILL = drafting_step(0, prefill=(1000, 0.01))  # 10 µs per token


def test_an_unknown_prefill_costs_nothing() -> None:
    assert DraftPrefillCost().seconds(candidate(1)) == 0.0


def test_a_new_sequence_computes_all_its_tokens() -> None:
    assert after(PREFILL).seconds(candidate(1, 300)) == pytest.approx(300 * 1e-5)
    assert after(PREFILL).seconds(candidate(1, 600)) == pytest.approx(600 * 1e-5)


def test_a_sequence_that_ends_soon_has_few_tokens_to_recover_it() -> None:
    long, short = candidate(1, 300), candidate(2, 300, remaining=10)
    cost, each = after(PREFILL), 300 * 1e-5
    assert cost.unprofitable([long, short], [1, 1], 1.01 * each / 10) == set()
    assert cost.unprofitable([long, short], [1, 1], 0.99 * each / 10) == {1}
    assert cost.unprofitable([long, short], [1, 1], 0.99 * each / HORIZON) == {0, 1}
    assert cost.unprofitable([long, short], [1, 0], 0.99 * each / HORIZON) == {0}
    assert cost.unprofitable([candidate(3, 300, remaining=0)], [1], 1.01 * each) == set()


def test_a_prefill_beside_decoding_takes_longer_than_in_the_warm_up() -> None:
    """128 sequences have 128 tokens left, and drafting is to save 8 µs of each: as a prefill of 300 tokens alone takes 0.39 ms,
    it would be worth it, but not beside their steps."""
    cost = DraftPrefillCost()
    cost.calibrate("draft", 1.3e-6)
    assert cost.prompt_seconds(["draft"]) == 1.3e-6
    assert cost.seconds(candidate(1, 300)) > 2 * 300 * 1.3e-6
    assert cost.unprofitable([candidate(1, 300, remaining=128)], [1], 8e-6) == {0}


@pytest.mark.parametrize("steps", [0, 3, 8, 20])
def test_a_sequence_that_drafts_is_never_unprofitable(steps: int) -> None:
    cost = after(PREFILL, *[drafting_step()] * steps)
    assert cost.unprofitable([candidate(0), candidate(1)], [1, 1], 1e-9) == ({1} if steps <= 8 else {0, 1})
    assert DraftPrefillCost().unprofitable([candidate(0)], [1], 1e-9) == set()


def test_a_sequence_that_drafts_needs_no_prefill() -> None:
    assert after(PREFILL).seconds(candidate(0)) == 0.0
    assert after(PREFILL, *[drafting_step()] * 8).seconds(candidate(0)) == 0.0


def test_a_sequence_that_paused_computes_the_missed_tokens() -> None:
    assert after(PREFILL, *[drafting_step()] * 20).seconds(candidate(0, 300)) == pytest.approx(20 * 1e-5)
    assert after(PREFILL, *[drafting_step()] * 20).seconds(candidate(0, 5)) == pytest.approx(5 * 1e-5)


def test_a_rising_cost_is_followed() -> None:
    cost = after(PREFILL, *[drafting_step(0, prefill=(1000, 0.03))] * 20)
    assert cost.seconds(candidate(1, 300)) == pytest.approx(300 * 3e-5, rel=0.01)


def test_methods_are_separate() -> None:
    assert after(PREFILL).seconds(candidate(1, traffic="ngram/chat")) == 0.0
    assert after(PREFILL, drafting_step(0, method="ngram")).seconds(candidate(1)) > 0.0


def test_ended_sequences_are_forgotten() -> None:
    cost = after(*(drafting_step(i) for i in range(10_000)))
    assert len(cost._last_drafted) < 8192


def test_one_slow_prefill_is_soon_outweighed() -> None:
    expected = pytest.approx(300 * 1e-5, rel=0.4)
    compiled_first = after(drafting_step(0, prefill=(1000, 3.0)), PREFILL)
    assert compiled_first.seconds(candidate(1, 300)) == expected
    in_between = after(*[PREFILL] * 8, drafting_step(0, prefill=(1000, 3.0)))
    assert in_between.seconds(candidate(1, 300)) < 2 * 300 * 1e-5
    paused = after(*[PREFILL] * 8, drafting_step(0, prefill=(1000, 3.0)), *[PREFILL] * 4)
    assert paused.seconds(candidate(1, 300)) == expected


# --- switching on

PLAIN, EXPECTED = 0.010, 0.012


def timed_step(requested: int = 0, seconds: float = EXPECTED, behind: int = 0, **fields: Any) -> StepObservation:
    """A step in which `requested` of eight sequences draft one token; the first `behind` return no draft."""
    return StepObservation(
        **{
            "batch": 8,
            "rows": 8 + requested,
            "prefill_rows": 0,
            "drafting": (DraftingObservation("draft", 1, seconds - PLAIN),) if requested else (),
            "verify_seconds": PLAIN,
            "network_seconds": 0.0,
            "rounds": tuple(
                RoundObservation(i, traffic_class("draft/chat"), int(i >= behind), 0, 1) for i in range(requested)
            ),
            **fields,
        }
    )


def observed(*steps: StepObservation) -> SwitchOnCost:
    cost = SwitchOnCost()
    for one in steps:
        cost.observe(one, EXPECTED)
    return cost


def switch(seconds: float) -> list[StepObservation]:
    """Many plain steps, an untimed step of the switch, and a step after it."""
    return [*[timed_step()] * 10, timed_step(8, seconds, is_timed=False), timed_step(8)]


def test_an_unknown_switch_costs_nothing() -> None:
    assert SwitchOnCost().seconds(8) == 0.0


def test_every_step_until_all_drafts_come_counts() -> None:
    cost = observed(timed_step(8, 0.052, behind=1, is_timed=False), timed_step(8, 0.052, is_timed=False), timed_step(8))
    assert cost.seconds(8) == pytest.approx(0.080)
    assert cost.seconds(2) == pytest.approx(0.020)


def test_a_larger_batch_does_not_multiply_the_cost_and_learns_its_own() -> None:
    cost = observed(*switch(0.052))
    assert cost.seconds(64) == pytest.approx(0.040)
    for one in (*[timed_step()] * 10, timed_step(8, 0.112, is_timed=False, batch=64), timed_step(8, batch=64)):
        cost.observe(one, EXPECTED)
    assert cost.seconds(64) == pytest.approx(0.100)
    assert cost.seconds(8) == pytest.approx(0.040)


def test_an_abandoned_switch_counts() -> None:
    assert observed(timed_step(4, 0.052, behind=1, is_timed=False), timed_step()).seconds(8) == pytest.approx(0.040)


def test_the_cost_is_that_of_the_batch_however_few_draft() -> None:
    assert observed(timed_step(2, 0.052, is_timed=False), timed_step(2)).seconds(8) == observed(*switch(0.052)).seconds(
        8
    )


def test_drafting_after_one_plain_step_is_no_switch() -> None:
    cost = observed(
        timed_step(8, 0.052, is_timed=False), timed_step(8), timed_step(), timed_step(8, is_timed=False), timed_step(8)
    )
    assert cost.seconds(8) == pytest.approx(0.040)


def test_drafting_after_many_plain_steps_is_a_switch() -> None:
    assert observed(*switch(0.172), *switch(0.052)).seconds(8) == pytest.approx(0.040)


def test_the_median_ignores_one_slow_switch() -> None:
    assert observed(*switch(0.052), *switch(2.0), *switch(0.062)).seconds(8) == pytest.approx(0.050)
    assert observed(*switch(2.0), *switch(0.052)).seconds(8) == pytest.approx(0.040)


def test_a_rising_switch_cost_is_followed() -> None:
    cost = observed(*switch(0.052), *switch(0.172), *switch(0.172))
    assert cost.seconds(8) == pytest.approx(0.160)


def test_later_untimed_steps_are_no_switch() -> None:
    cost = observed(timed_step(8, 0.052, is_timed=False), *[timed_step(8, 0.022, is_timed=False)] * 200, timed_step())
    assert cost.seconds(8) == pytest.approx(0.040)


def test_steps_with_prefill_are_ignored() -> None:
    assert observed(timed_step(8, 0.9, is_timed=False, prefill_rows=500), timed_step(8)).seconds(8) == 0.0


def test_nothing_is_learned_without_an_expected_time() -> None:
    cost = SwitchOnCost()
    cost.observe(timed_step(8, 0.9), None)
    assert cost.seconds(8) == 0.0
