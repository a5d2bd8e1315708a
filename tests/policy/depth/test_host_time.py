from paceline.policy.depth.goodput import GoodputDepth
from paceline.policy.depth.observation import DepthCandidate, DraftingObservation, RoundObservation, StepObservation
from paceline.policy.depth.step_cost import HOST_WINDOW as WINDOW
from paceline.policy.depth.step_cost import LEAST, HostTime
from tests.traffic import traffic_class

MS = 1e-3


def step(
    host: float | None, depth: int = 0, batch: int = 1, prefill_rows: int = 0, slots: int | None = None
) -> StepObservation:
    drafting = (DraftingObservation("one", depth, 0.1 * MS),) if depth else ()
    rounds = (RoundObservation(1, traffic_class("one/chat"), depth, depth - depth // 2, depth),) if depth else ()
    rows = batch + depth
    return StepObservation(batch, rows, prefill_rows, drafting, MS, 0.0, rounds, slots=slots, host_seconds=host)


def test_a_time_belongs_to_the_step_before() -> None:
    times = HostTime()
    for _ in range(LEAST):
        times.observe(step(0.5 * MS))
        times.observe(step(0.2 * MS, depth=3))
    times.observe(step(0.5 * MS))
    assert times.plain(1) == 0.2 * MS
    assert times.drafting(1) == 0.5 * MS


def test_few_samples_are_not_used() -> None:
    times = HostTime()
    for _ in range(LEAST):  # before the first of these is no step
        times.observe(step(0.2 * MS))
    assert times.plain(1) == 0.0
    assert times.drafting(1) == 0.0
    times.observe(step(0.2 * MS))
    assert times.plain(1) == times.drafting(1) == 0.2 * MS


def test_pauses_prompts_and_padded_steps_do_not_count() -> None:
    times = HostTime()
    for _ in range(2 * LEAST):
        times.observe(step(0.2 * MS))
    prompt, after_prompt, idle, padded = step(9.0, prefill_rows=5), step(9.0), step(None), step(0.2 * MS, slots=4)
    for odd in (prompt, after_prompt, idle, padded, step(9.0), step(9.0)):  # the last one is a single pause
        times.observe(odd)
    assert times.plain(1) == 0.2 * MS
    assert times.plain(8) == 0.0


def test_old_times_are_forgotten() -> None:
    times = HostTime()
    for seconds in (0.2 * MS, 0.6 * MS):
        for _ in range(WINDOW + 1):
            times.observe(step(seconds))
    assert times.plain(1) == 0.6 * MS


def drafted(host_of_drafts: float) -> list[int]:
    """Depths that the policy chooses where half of the drafts are accepted, with this host time after a step with drafts."""
    policy = GoodputDepth(max_depth=4, probe_share=0.0)
    policy.calibrate({1: MS, 8: MS})
    host, found = 0.1 * MS, []
    for _ in range(400):
        depth = policy.decide([DepthCandidate(1, traffic_class("one/chat"), 4)])[0]
        found.append(depth)
        policy.observe(step(host, depth=depth or 0))
        host = host_of_drafts if depth else 0.1 * MS
    return found[-100:]


def test_drafts_whose_host_time_exceeds_their_gain_stop() -> None:
    """Free drafts, of which every second one is accepted, pay unless the host needs longer for the step than they save."""
    assert sum(drafted(0.1 * MS)) > 100
    assert sum(drafted(4.0 * MS)) < 30
