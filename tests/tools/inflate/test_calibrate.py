import pytest

from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidRequest
from paceline.policy.cost.cost import Footprint
from paceline.tools.inflate.calibration import (
    _methods,
    alphas_by_level,
    calibration_config,
    depths_to_measure,
    pass_times,
    summarise,
)
from paceline.tools.profile.measurement import RoundTimes
from paceline.tools.profile.recorder import Outcome, RecordedRound


def one(*outcomes: Outcome, draft: float = 0.0, total: float = 1.0, batch: int = 1) -> RecordedRound:
    times = RoundTimes(draft, total - draft, 0.0, 0.0, total, 0)
    return RecordedRound("x", times, batch, batch + sum(o.nodes for o in outcomes), 0, outcomes)


def test_depths_to_measure() -> None:
    assert depths_to_measure(1) == [1]
    assert depths_to_measure(4) == [1, 4]
    assert depths_to_measure(10) == [1, 4, 10]
    assert depths_to_measure(32) == [1, 4, 16, 32]


def test_calibration_config_has_a_fixed_depth_and_no_audit() -> None:
    config = calibration_config(EngineConfig(audit_fraction=0.5), 12)
    speculation = config.speculation
    assert (speculation.enabled, speculation.depth, speculation.max_depth) == (True, "fixed", 12)
    assert config.audit_fraction == 0.0


def test_unknown_method_is_rejected() -> None:
    assert _methods(("ngram", "suffix"), ()) == ["ngram", "suffix"]
    assert _methods(("ngram", "suffix"), ("suffix",)) == ["suffix"]
    with pytest.raises(InvalidRequest, match="unknown method 'eagle'; choose from: ngram, suffix"):
        _methods(("suffix", "ngram"), ("eagle",))


def test_too_few_rounds_error_has_advice() -> None:
    with pytest.raises(InvalidRequest, match="--tokens"):
        pass_times([one()])


def test_pass_times_do_not_decrease() -> None:
    rounds = [one(total=3.0)] * 3 + [one(Outcome(1, 1, 1, 0), total=2.0)] * 3
    assert pass_times(rounds) == {1: 2.5, 2: 2.5}


def test_alpha_by_level_ignores_levels_after_a_rejection() -> None:
    rounds = [(3, 3)] * 5 + [(3, 1)] * 5  # level 2: 5 of 10; level 3: 5 of 5
    assert alphas_by_level(rounds) == (1.0, 0.5, 1.0)
    assert alphas_by_level([(3, 0)] * 10) == (0.0,)
    assert alphas_by_level([(3, 3)] * 4) == ()  # too few trials


def test_pass_times_exclude_drafting() -> None:
    rounds = [one(total=t) for t in (1.0, 2.0, 9.0)] + [one(Outcome(1, 1, 1, 0), draft=1.0, total=4.0)] * 3
    assert pass_times([*rounds, one(Outcome(4, 4, 4, 0))]) == {1: 2.0, 2: 3.0}  # five rows occurred once


def test_chain_is_summarised_from_its_deepest_run() -> None:
    deep = [one(Outcome(2, 2, 2, 1), draft=0.2)] * 8 + [one(Outcome(2, 0, 0, 0), draft=0.2)] * 8
    shallow = [one(Outcome(1, 1, 1, 1), draft=0.1), one(Outcome(1, 1, 1, 1), draft=9.0, batch=2)]
    method = summarise("ngram", {2: deep, 1: shallow}, 1, Footprint(7))
    assert method is not None
    assert method.alphas == (1.0, 0.0)
    assert method.delivery == 0.5
    assert method.draft_seconds == {2: 0.2, 1: 0.1}
    assert method.tokens == {}
    assert method.footprint.weight_bytes == 7


def test_tree_is_summarised_by_its_tokens() -> None:
    rounds = {4: [one(Outcome(4, 2, 4, 2))] * 6 + [one(Outcome(4, 2, 4, 0))] * 2, 2: [one(Outcome(2, 1, 2, 1))] * 4}
    method = summarise("eagle", rounds, 1, Footprint())
    assert method is not None
    assert method.tokens == {4: pytest.approx(2.5), 2: pytest.approx(2.0)}
    assert method.nodes == {4: 4.0, 2: 2.0}


def test_short_chain_is_summarised_by_its_tokens() -> None:
    method = summarise("suffix", {8: [one(Outcome(8, 3, 3, 3))] * 4 + [one(Outcome(8, 1, 1, 0))] * 4}, 1, Footprint())
    assert method is not None
    assert (method.tokens, method.nodes) == ({8: 2.5}, {8: 2.0})


def test_method_without_drafts_is_none() -> None:
    assert summarise("ngram", {4: [one(Outcome(4, 0, 0, 0))] * 9}, 1, Footprint()) is None
