"""Whether a padded batch drafts: as a whole, and with the prompts of a generation of texts in its expected gain."""

from dataclasses import dataclass

from paceline.policy.cost.curve import LinearCost
from paceline.policy.depth.acceptance import Acceptance
from paceline.policy.depth.allocation import PaddedBatch
from paceline.policy.depth.best_drafts import BestDrafts
from paceline.policy.depth.goodput import GoodputDepth
from paceline.policy.depth.observation import DepthCandidate, RoundObservation, StepObservation
from paceline.policy.depth.prompt_load import QUIET_STEPS, PromptLoad
from paceline.policy.depth.start_cost import DraftPrefillCost, SwitchOnCost
from paceline.policy.depth.step_cost import StepTime
from tests.traffic import traffic_class

BATCH, PROMPT, OUTPUT = 128, 300, 128
SHAPE = PaddedBatch(frozenset({"draft"}), lambda batch: batch, lambda depth: depth)
PASSES = {1: 4e-3, 128: 5.2e-3, 256: 6.8e-3, 512: 10.7e-3, 1024: 19.8e-3}
LINES = {BATCH: LinearCost(0.0, 1e-3)}


def step(prompt_rows: int = 0, batch: int = BATCH, drafting: int = 0) -> StepObservation:
    rounds = tuple(RoundObservation(i, traffic_class("draft"), 1, 0, 1) for i in range(drafting))
    return StepObservation(batch, batch, prompt_rows, (), 5e-3, 0.0, rounds)


def sequences(count: int = BATCH, prompt: int = PROMPT, made: int = 10, first: int = 0) -> list[DepthCandidate]:
    return [
        DepthCandidate(first + i, traffic_class("draft"), 4, prompt + made, OUTPUT - made, prompt) for i in range(count)
    ]


@dataclass
class Estimates:
    """Costs of a large GPU: one draft each gains 20% alone, and next to nothing beside the prompts of these texts."""

    prompts: PromptLoad
    prefill: DraftPrefillCost
    best: BestDrafts

    def observe(self, *steps: StepObservation) -> None:
        for one in steps:
            self.prompts.observe(one)
            self.prefill.observe(one)


def estimates(prefill_seconds: float = 3e-7) -> Estimates:
    times, acceptance, prompts, prefill = StepTime(), Acceptance(4), PromptLoad(), DraftPrefillCost()
    times.calibrate(PASSES)
    times.calibrate_drafts("draft", LINES)
    acceptance.restart("draft", 0.8)
    prefill.calibrate("draft", prefill_seconds)
    return Estimates(prompts, prefill, BestDrafts(acceptance, times, SwitchOnCost(), prefill, prompts))


def test_a_batch_drafts_if_no_prompts_come() -> None:
    assert all(estimates().best.find(sequences(), SHAPE) or [0])


def test_a_batch_between_two_bursts_of_prompts_does_not_start() -> None:
    one = estimates()
    one.observe(*[step(8192)] * 5, *[step()] * QUIET_STEPS)
    assert one.prompts.rows_per_token(sequences()) == 0.0
    assert one.best.find(sequences(), SHAPE) is None
    one.observe(*[step()] * OUTPUT)
    assert all(one.best.find(sequences(), SHAPE) or [0])


def test_a_small_batch_drafts_between_bursts_too() -> None:
    one, few = estimates(), sequences(16)
    one.observe(*[step(4800, batch=16)], *[step(batch=16)] * QUIET_STEPS)
    assert all(one.best.find(few, SHAPE) or [0])


def test_no_sequence_of_a_batch_that_drafts_is_left_behind() -> None:
    """The draft prefill of a long prompt costs more than drafting saves for one sequence on average, but without drafts
    the sequence would take nearly twice as many steps, each as long as those of the others."""
    one, long = estimates(), sequences(8, 2400, first=BATCH)
    one.observe(step(drafting=BATCH - 8))
    batch = [*sequences(BATCH - 8), *long]
    assert one.prefill.unprofitable(batch, [1] * BATCH, 6e-6) == {*range(BATCH - 8, BATCH)}
    assert all(one.best.find(batch, SHAPE) or [0])


def test_a_sequence_that_is_about_to_end_is_left_out() -> None:
    one = estimates()
    one.observe(step(drafting=BATCH - 8))
    depths = one.best.find([*sequences(BATCH - 8), *sequences(8, 1100, made=OUTPUT - 6, first=BATCH)], SHAPE) or []
    assert all(depths[: BATCH - 8])
    assert not any(depths[BATCH - 8 :])


def test_a_batch_does_not_start_if_its_draft_prefills_cost_more_than_its_texts_gain() -> None:
    assert all(estimates(5e-7).best.find(sequences(made=2), SHAPE) or [0])
    assert estimates(5e-7).best.find(sequences(made=OUTPUT // 2), SHAPE) is None


def test_a_growing_batch_waits_until_all_sequences_have_joined() -> None:
    one, few = estimates(), sequences(16)
    one.prompts.expect(4800)
    assert one.best.find(few, SHAPE) is None
    assert one.best.is_waiting
    one.prompts.expect(0)
    assert all(one.best.find(few, SHAPE) or [0])
    assert not one.best.is_waiting


def test_a_drafting_batch_goes_on_while_others_join() -> None:
    one = estimates()
    assert one.best.find(sequences(16), SHAPE) is not None
    one.observe(step(2 * PROMPT, batch=16, drafting=16))
    one.prompts.expect(4800)
    assert all(one.best.find(sequences(18), SHAPE) or [0])


def test_other_sequences_start_anew() -> None:
    one = estimates()
    assert one.best.find(sequences(16), SHAPE) is not None
    one.observe(step(drafting=16, batch=16))
    one.prompts.expect(4800)
    assert one.best.find(sequences(16, first=100), SHAPE) is None
    assert one.best.is_waiting


def test_the_decision_to_wait_does_not_hold_for_later_steps() -> None:
    policy = GoodputDepth(4, padded=[SHAPE])
    policy.calibrate(PASSES)
    policy.calibrate_drafts("draft", LINES, 1e-6)
    policy.expect_prompts(4800)
    assert not any(policy.decide(sequences(16)))
    assert not policy.skip_step(16)
