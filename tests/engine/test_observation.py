"""The observation of a step: which sequences it counts, and whose costs."""

from paceline.core.sequence import Origin
from paceline.engine.observation import StepContents, StepCost, observe_rounds, observe_step
from paceline.engine.step.step import SequenceResult, StepResult
from paceline.policy.depth.observation import DraftingObservation, RoundObservation
from paceline.speculation.drafts.drafts import DraftPrefill
from paceline.speculation.verification.verification import Verdict
from tests.engine.step.case import NO_TIMES, Case
from tests.traffic import traffic_class

PLAIN = Verdict((), (4,), (Origin.PLAIN,))


def step(*sequences: SequenceResult) -> StepResult:
    return StepResult(list(sequences), NO_TIMES, 0.5, 0.5, rows=7, context=30)


def test_contents_separate_rounds_plain_sequences_and_prompts() -> None:
    case = Case()
    drafted, plain, last_prompt, prompt, given = (case.sequence() for _ in range(5))
    given.draft = (5, 6)
    round_ = SequenceResult(drafted, 1, PLAIN, num_reserved=3)
    contents = StepContents.of(
        step(
            round_,
            SequenceResult(plain, 1, PLAIN),
            SequenceResult(last_prompt, 4, PLAIN),  # its last row decodes
            SequenceResult(prompt, 8, None),
            SequenceResult(given, 1, PLAIN, num_reserved=2, num_nodes=2),
        )
    )
    assert contents.rounds == [round_]
    assert contents.plain == [plain, last_prompt]
    assert (contents.batch, contents.prefill_rows) == (3, 3 + 8 + 3)


def test_a_round_knows_whether_its_draft_prefill_goes_on() -> None:
    case = Case()
    a, b = case.sequence(), case.sequence()
    rounds = [SequenceResult(one, 1, PLAIN, num_reserved=3) for one in (a, b)]
    observed = observe_rounds(rounds, lambda sequence: traffic_class(f"class {sequence.id}"), {b.id})
    assert observed == (
        RoundObservation(a.id, traffic_class(f"class {a.id}"), 0, 0, 3, num_nodes=0, path=(), is_behind=False),
        RoundObservation(b.id, traffic_class(f"class {b.id}"), 0, 0, 3, num_nodes=0, path=(), is_behind=True),
    )


def test_a_step_has_the_deepest_request_and_the_cost_of_each_method() -> None:
    case = Case()
    rounds = [SequenceResult(case.sequence(), 1, PLAIN, num_reserved=asked) for asked in (2, 5, 3)]
    rounds.append(SequenceResult(case.sequence(method="two"), 1, PLAIN, num_reserved=1))
    result = step(*rounds)
    cost = StepCost({"one": 0.25}, {"one": DraftPrefill(30, 4.0)}, 0.125, idle_seconds=2.0, is_timed=False)
    contents = StepContents.of(result)
    observed = observe_step(result, contents, cost, observe_rounds(rounds, lambda _: "x", ()))
    assert observed.drafting == (DraftingObservation("one", 5, 0.25, 30, 4.0), DraftingObservation("two", 1, 0.0))
    assert (observed.network_seconds, observed.switch_on_seconds, observed.is_timed) == (0.125, 2.0, False)
    assert (observed.batch, observed.rows, observed.context) == (4, 7, 30)


def test_a_plain_step_has_no_switch_on_time() -> None:
    result = step(SequenceResult(Case().sequence(), 1, PLAIN))
    cost = StepCost({}, {}, 0.0, idle_seconds=2.0, is_timed=True)
    assert observe_step(result, StepContents.of(result), cost, ()).switch_on_seconds == 0.0
