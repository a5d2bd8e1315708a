from paceline.policy.depth.acceptance import Acceptance
from paceline.policy.depth.allocation import PaddedBatch
from paceline.policy.depth.best_drafts import BestDrafts
from paceline.policy.depth.observation import DepthCandidate, DraftingObservation, RoundObservation, StepObservation
from paceline.policy.depth.prompt_load import GENERATION_STEPS, QUIET_STEPS, SHARED_ROWS, WINDOW_STEPS, PromptLoad
from paceline.policy.depth.start_cost import DraftPrefillCost, SwitchOnCost
from paceline.policy.depth.step_cost import StepTime
from tests.traffic import traffic_class

DRAFT = traffic_class("draft_model")
BATCH = 128
SHAPE = PaddedBatch(frozenset({"draft_model"}), lambda batch: batch, lambda depth: depth)


def step(prefill_rows: int, batch: int = BATCH, accepted: int = 0) -> StepObservation:
    rounds = (RoundObservation(0, DRAFT, 2, accepted, 2, 2, tuple(range(accepted))),) if accepted else ()
    return StepObservation(batch, batch, prefill_rows, (), 5e-3, 0.0, rounds)


def test_steps_without_prompts_count() -> None:
    load = PromptLoad()
    for rows in (250, 0) * WINDOW_STEPS:
        load.observe(step(rows))
    assert load.rows_per_token(()) == 125 / BATCH


def test_the_first_prompts_of_a_batch_do_not_count() -> None:
    load = PromptLoad()
    for rows in (8000, 8000, 8000, 8000, *[0] * WINDOW_STEPS):
        load.observe(step(rows))
        assert load.rows_per_token(()) == 0.0


def test_prompts_that_have_ended_do_not_count() -> None:
    load = PromptLoad()
    for rows in (*[250] * WINDOW_STEPS, *[0] * (QUIET_STEPS - 1)):
        load.observe(step(rows))
    assert load.rows_per_token(()) > 0.0
    load.observe(step(0))
    assert load.rows_per_token(()) == 0.0


def test_accepted_drafts_are_tokens_too_and_steps_without_any_are_left_out() -> None:
    load = PromptLoad()
    for _ in range(WINDOW_STEPS):
        load.observe(step(9, batch=1, accepted=2))
        load.observe(step(500, batch=0))
    assert load.rows_per_token(()) == 3.0


def test_prompts_of_a_batch_that_has_just_begun_count_as_one_each() -> None:
    """40 prompts of 250 tokens, each for 125 tokens of output, were computed within a few steps."""
    load = PromptLoad()
    for _ in range(WINDOW_STEPS):
        load.observe(step(2000, batch=40))
    batch = [DepthCandidate(i, DRAFT, 8, 260, 115, 250) for i in range(40)]
    assert load.rows_per_token(batch) == 250 / 125
    unknown = [*batch, DepthCandidate(40, DRAFT, 8, 260, None, 250)]
    assert load.rows_per_token(unknown) == 2000 / 40


def test_bursts_of_prompts_count_for_a_generation_of_texts() -> None:
    """40 texts of 250 tokens for 125 tokens each; the steps that compute prompts alone count too."""
    load, batch = PromptLoad(), [DepthCandidate(i, DRAFT, 8, 260, 115, 250) for i in range(40)]
    for rows, decoding in *[(1000, 0)] * 8, (1000, 30), *[(0, 40)] * 100:
        load.observe(step(rows, batch=decoding))
    assert load.lasting_rows_per_token(batch) == 250 / 125
    for _ in range(24):
        load.observe(step(0, batch=40))
    assert load.lasting_rows_per_token(batch) == 9000 / (30 + 124 * 40)
    for _ in range(2):
        load.observe(step(0, batch=40))
    assert load.lasting_rows_per_token(batch) == 0.0


def test_few_rows_of_a_long_pass_over_prompts_count_for_a_generation() -> None:
    load, batch = PromptLoad(), [DepthCandidate(i, DRAFT, 8, 260, 115, 250) for i in range(40)]
    for rows, decoding in (8000, 0), (2000, 30), *[(0, 40)] * 100:
        load.observe(step(rows, batch=decoding))
    assert load.lasting_rows_per_token(batch) == 2 * SHARED_ROWS / (30 + 100 * 40)


def test_unknown_lengths_have_no_generation() -> None:
    load = PromptLoad()
    load.observe(step(8000))
    assert load.lasting_rows_per_token([DepthCandidate(0, DRAFT, 8, 260, None, 250)]) == 0.0
    assert load.lasting_rows_per_token([DepthCandidate(0, DRAFT, 8, 260, 115)]) == 0.0


def test_old_steps_are_forgotten() -> None:
    load = PromptLoad()
    for _ in range(3 * GENERATION_STEPS):
        load.observe(step(1))
    assert len(load._all_rows) <= 2 * GENERATION_STEPS
    assert load.lasting_rows_per_token([DepthCandidate(0, DRAFT, 8, 260, 128 - 10, 250)]) == 1 / BATCH


def test_a_batch_grows_if_its_prompts_are_many_for_its_size() -> None:
    load, batch = PromptLoad(), [DepthCandidate(i, DRAFT, 8, 260, 115, 250) for i in range(40)]
    assert not load.is_growing(batch)
    load.expect(1500)
    assert load.is_growing(batch)
    assert not load.is_growing(batch * 2)
    load.expect(0)
    assert not load.is_growing(batch)
    load.observe(step(1500, batch=40))
    assert load.is_growing(batch)
    assert not load.is_growing(batch[:16]), "its last prompt is computed, and no other waits"
    load.observe(step(0, batch=40))
    assert not load.is_growing(batch)


def drafts(prompt_rows: int, prefill_seconds: float = 0.0) -> list[int] | None:
    """Depths of a batch for which rows are free up to 512, and drafts cost half a pass. `prefill_seconds`: draft prefill of a
    prompt row."""
    times, acceptance, load = StepTime(), Acceptance(8), PromptLoad()
    times.calibrate({1: 5e-3, 512: 5e-3, 1024: 10e-3, 2048: 20e-3})
    drafting = (DraftingObservation("draft_model", 1, 2e-3, 0, 0.0),)
    for _ in range(4):
        times.observe(StepObservation(BATCH, 2 * BATCH, 0, drafting, 5e-3, 0.0, (), slots=BATCH))
    acceptance.restart("draft_model", 0.6)
    for _ in range(WINDOW_STEPS):
        load.observe(step(prompt_rows))
    prefill = DraftPrefillCost()
    prefill.calibrate("draft_model", prefill_seconds)
    rounds = tuple(RoundObservation(i, DRAFT, 1, 0) for i in range(BATCH))  # these have their draft prefill
    prefill.observe(StepObservation(BATCH, 2 * BATCH, 0, (), 5e-3, 0.0, rounds))
    best = BestDrafts(acceptance, times, SwitchOnCost(), prefill, load)
    return best.find([DepthCandidate(i, DRAFT, 4, 300, 100) for i in range(BATCH)], SHAPE)


def test_drafts_that_pay_alone_may_not_pay_beside_prompts() -> None:
    assert max(drafts(0) or [0]) > 0
    assert drafts(8 * BATCH) is None


def test_drafts_that_pay_beside_prompts_may_not_pay_for_their_draft_prefill() -> None:
    assert max(drafts(BATCH // 4) or [0]) > 0
    assert drafts(BATCH // 4, prefill_seconds=1e-4) is None
    assert max(drafts(0, prefill_seconds=1e-4) or [0]) > 0
