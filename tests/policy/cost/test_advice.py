import pytest

from paceline.policy.cost.advice import advise
from paceline.policy.cost.cost import Footprint, MethodCosts, TargetCosts

MS = 1e-3


def target(**options: object) -> TargetCosts:
    return TargetCosts({1: 15 * MS}, **options)  # type: ignore[arg-type]


def draft(
    alpha: float, name: str = "draft_model", ms: float = 2.0, network: float = 0.0, **options: object
) -> MethodCosts:
    return MethodCosts(name, (alpha,), {0: 0.0, 32: 32 * ms * MS}, network * MS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("alpha", "depth"), [(0.7, 4), (0.8, 5), (0.9, 8)])
def test_best_depth_is_recommended_with_its_figures(alpha: float, depth: int) -> None:
    advice = advise(target(), [draft(alpha, network=0.5)], 16)
    assert advice.speculate
    assert (advice.choice.method, advice.choice.depth) == ("draft_model", depth)
    assert advice.verdict.startswith(f"Speculate with draft_model at depth {depth}: ")
    assert f"alpha {alpha:.2f}" in advice.reasons[0]
    assert f"depth {depth + 1} adds" in advice.reasons[1]
    assert [one.depth for one in advice.table] == list(range(17))


def test_low_acceptance_and_a_slow_draft_give_plain_decoding() -> None:
    advice = advise(target(), [draft(0.3, ms=6.0)], 8)
    assert not advice.speculate
    assert advice.choice.depth == 0
    assert advice.verdict.startswith("Do not speculate: the best, draft_model at depth 1, would run at 0.93x")
    # 0.4 = 6 ms of drafting over 15 ms of plain step
    assert "breaks even at alpha 0.40" in advice.reasons[0]
    assert "If drafting were free it would be 1.30x" in advice.reasons[0]
    assert "quantised target" in advice.reasons[0]


def test_gain_below_the_margin_is_no_gain() -> None:
    assert not advise(target(), [draft(0.42, ms=6.0)], 8).speculate  # 1.014x
    assert advise(target(), [draft(0.46, ms=6.0)], 8).speculate


def test_very_low_acceptance_loses_even_with_a_free_draft() -> None:
    growing = TargetCosts({1: 10 * MS, 9: 50 * MS})
    advice = advise(growing, [draft(0.2, ms=0.0)], 8)
    assert not advice.speculate
    assert "the larger pass" in advice.reasons[0]
    hopeless = advise(target(), [draft(0.01, ms=0.1)], 8)
    assert "Even a free draft would not pay" in hopeless.reasons[0]


def test_distant_draft_is_not_reported_as_low_acceptance() -> None:
    advice = advise(target(), [draft(0.8, ms=20.0, network=50.0)], 8)
    assert not advice.speculate
    # Depth 3: 44.3 ms of plain decoding against 65 ms without the drafting, 75 without the network
    assert "No single term takes the gain: even if drafting were free it would be 0.68x" in advice.reasons[0]
    assert "too little is accepted" not in advice.reasons[0]


def test_fastest_method_wins_and_the_next_is_named() -> None:
    advice = advise(
        target(), [draft(0.65, "ngram", 0.3), draft(0.78, "eagle", 0.5), draft(0.88, "layer_skip", 5.2)], 16
    )
    assert advice.choice.method == "eagle"
    assert any(reason.startswith("Next best: ngram at depth ") for reason in advice.reasons)


def test_rules_of_thumb_are_named_where_they_disagree() -> None:
    advice = advise(target(), [draft(0.45, "ngram", 0.01)], 8)
    assert advice.speculate
    text = " ".join(advice.reasons)
    assert "stay at depth 4" in text
    assert "expects a loss below alpha 0.5" in text
    assert not any("rule of thumb" in reason for reason in advise(target(), [draft(0.8)], 8).reasons)


def test_largest_depth_suggests_a_larger_max_depth() -> None:
    assert any("larger --max-depth" in reason for reason in advise(target(), [draft(0.9)], 4).reasons)


def test_memory_decides_between_methods() -> None:
    card = target(footprint=Footprint(70), memory_bytes=80)
    big, head = draft(0.9, footprint=Footprint(20)), draft(0.7, "eagle", 0.5, footprint=Footprint(5))
    advice = advise(card, [big, head], 8)
    assert advice.choice.method == "eagle"
    assert any("would be faster" in reason and "needs" in reason for reason in advice.reasons)
    alone = advise(card, [big], 8)
    assert not alone.speculate
    assert alone.verdict == "Do not speculate: no method fits the device's memory."
    assert "memory" in [caution.cause for caution in alone.cautions]


def test_cost_is_compared_if_a_price_is_given() -> None:
    advice = advise(target(price_per_hour=2.69), [draft(0.8)], 8)
    assert any(
        reason.startswith("A million tokens cost $") and "more expensive" not in reason for reason in advice.reasons
    )
    dear = advise(target(price_per_hour=1.0), [draft(0.8, price_per_hour=3.0)], 8)
    assert any("more expensive" in reason for reason in dear.reasons)


@pytest.mark.parametrize(
    ("cause", "one"),
    [
        ("acceptance", draft(0.6)),
        ("draft time", draft(0.99, ms=4.0)),
        ("network", draft(0.9, ms=0.1, network=5.0)),
    ],
)
def test_failure_modes_have_a_remedy(cause: str, one: MethodCosts) -> None:
    (found,) = [caution for caution in advise(target(), [one], 16).cautions if caution.cause == cause]
    assert found.remedy
    assert str(found).startswith(found.finding)


def test_cautions_at_a_large_batch() -> None:
    busy = TargetCosts({64: 10 * MS, 64 * 9: 20 * MS}, batch=64, kv_tokens=4096)
    causes = [caution.cause for caution in advise(busy, [draft(0.9, ms=0.2)], 8).cautions]
    assert causes == ["memory", "verify time"]
    assert not advise(target(), [draft(0.9, ms=1.0)], 8).cautions


def test_no_method() -> None:
    advice = advise(target(), [], 8)
    assert not advice.speculate
    assert len(advice.table) == 1
