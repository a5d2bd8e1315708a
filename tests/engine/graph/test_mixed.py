"""Mixed steps, on a GPU or interpreted: prompts join the decoding slots without the host, and the text stays the same."""

import random
from dataclasses import replace

import pytest

from paceline.core.request import Request, SpeculationParams
from paceline.core.sequence import BLOCK_SIZE
from paceline.engine.engine import Engine
from paceline.engine.graph import executor as graph_executor
from paceline.engine.graph import scheduler as graph_scheduler
from paceline.engine.graph.drafter import DraftPrefills
from paceline.engine.step.step import GRAPH, HostReason
from paceline.models.runner.gpu.runner import GpuRunner
from paceline.policy.depth import prompt_load
from paceline.policy.depth.rules import FixedDepth
from paceline.speculation.proposer import ProposerTraits
from paceline.speculation.proposers.suffix import NgramProposer
from tests.engine.graph.test_executor import DEVICE, SAMPLINGS, SMALL, check, executor_of, graph_engine
from tests.exactness.suite import plain_text
from tests.fakes import draft_model, request, tiny_model


def arriving(count: int, seed: int = 0, longest: int = 30, **sampling) -> list[Request]:
    dice = random.Random(seed)
    return [
        request(
            f"r{i}",
            dice.choices(range(SMALL.vocab_size), k=dice.randint(2, longest)),
            max_tokens=dice.randint(1, 9),
            **(sampling or SAMPLINGS[i % len(SAMPLINGS)]),
        )
        for i in range(count)
    ]


def reasons(engine: Engine) -> dict[str, int]:
    return {name: count for name, count in engine.executors.counts.items() if name != GRAPH}


@pytest.mark.usefixtures("captures_with_a_run")
def test_requests_that_arrive_join_without_the_host():
    engine = graph_engine(None)
    first = request("first", [1, 2, 3], temperature=0.0, max_tokens=40)
    check(engine, [first, *arriving(9)], arrivals=1)
    # The host starts the first, and takes over when the slots are half empty
    assert set(reasons(engine)) <= {HostReason.IDLE, HostReason.RESIZE, HostReason.PREFILL}
    assert engine.executors.counts[GRAPH] > 30


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.interpreted) for seed in (1, 2))])
def test_any_mix_of_samplings_and_lengths(seed):
    engine = graph_engine(None, max_num_seqs=5, max_batched_tokens=32, kv_tokens=512)
    check(engine, arriving(12, seed), arrivals=2)


def test_a_long_prompt_is_computed_in_chunks_while_others_decode():
    engine = graph_engine(None, max_batched_tokens=16, kv_tokens=512)
    asked = [
        request("short", [1, 2, 3], temperature=0.0, max_tokens=30),
        request("long", [i % 7 for i in range(90)], temperature=1.0, seed=5, max_tokens=5),
    ]
    check(engine, asked, arrivals=1)
    assert HostReason.ADMISSION not in engine.executors.counts
    assert engine.executors.counts[HostReason.PREFILL] == 0


def test_short_prompts_pass_a_long_one_without_the_host(monkeypatch):
    """Pieces of several prompts share a step; the second of two tenants does not wait for the first."""
    monkeypatch.setattr("paceline.policy.prompt_line.SHORT_ROWS", 16)
    asked = [
        request("first", [1, 2, 3], temperature=0.0, max_tokens=40),
        replace(request("long", [i % 7 for i in range(180)], temperature=0.0, max_tokens=2), tenant="a"),
        request("short", [i % 5 for i in range(12)], temperature=0.0, max_tokens=2),
        replace(request("other", [i % 6 for i in range(160)], temperature=0.0, max_tokens=2), tenant="b"),
    ]
    engine, order = graph_engine(None, max_batched_tokens=40, kv_tokens=512), list[str]()
    graph = executor_of(engine)
    submit, widths = graph._submit_mixed, list[int]()
    graph._submit_mixed = lambda schedule, drafts: widths.append(len(schedule.items)) or submit(schedule, drafts)
    arrivals = iter(asked)
    while engine.has_work or not order:
        if (arrived := next(arrivals, None)) is not None:
            engine.add(arrived)
        order += [output.request_id for output in engine.step() if output.request_id not in order]
    assert order.index("short") < order.index("long")
    assert max(widths) > 1
    assert engine.executors.counts[HostReason.PREFILL] == 0
    check(graph_engine(None, max_batched_tokens=40, kv_tokens=512), asked, arrivals=1)


def test_a_prompt_of_which_one_token_is_left_joins():
    """A chunk may leave one token, as many as a sequence that decodes has left."""
    engine = graph_engine(None, max_batched_tokens=16, kv_tokens=512)
    asked = [
        request("short", [1, 2, 3], temperature=0.0, max_tokens=40),
        *(request(f"r{n}", [i % 7 for i in range(n)], temperature=0.0, max_tokens=2) for n in range(14, 20)),
    ]
    for one in asked:
        engine.add(one)
    for _ in range(20):
        engine.step()
    assert [sequence.request_id for sequence in engine.scheduler.running] == ["short"]


@pytest.mark.parametrize("max_tokens", [3, pytest.param(6, marks=pytest.mark.interpreted)])
def test_a_long_prompt_whose_neighbour_ends_is_completed_by_the_host(max_tokens):
    engine = graph_engine(None, max_batched_tokens=16, kv_tokens=512, max_num_seqs=2)
    asked = [
        request("short", [1, 2, 3], temperature=0.0, max_tokens=max_tokens),
        request("long", [i % 7 for i in range(70)], temperature=0.0, max_tokens=3),
    ]
    check(engine, asked, arrivals=1)


def test_prompt_rows_of_a_step_are_bounded(monkeypatch):
    monkeypatch.setattr("paceline.policy.step.MIXED_PROMPT_ROWS", 8)
    monkeypatch.setattr("paceline.policy.step.CHEAP_ROWS", 8)
    engine, rows = graph_engine(None), []
    graph = executor_of(engine)
    submit = graph._submit_mixed
    graph._submit_mixed = lambda schedule, drafts: rows.append(schedule.num_tokens) or submit(schedule, drafts)
    first = request("first", [1, 2, 3], temperature=0.0, max_tokens=30)
    check(engine, [first, *arriving(3, longest=20)], arrivals=1)
    assert rows
    assert max(rows) <= BLOCK_SIZE


def test_cancelled_while_its_prompt_is_in_flight():
    engine = graph_engine(None, max_batched_tokens=16, kv_tokens=512)
    kept = request("kept", [1, 2, 3], temperature=0.0, max_tokens=20)
    engine.add(kept)
    engine.step()
    for length in (9, 60):  # complete in one step, and in chunks
        engine.add(request("gone", [i % 7 for i in range(length)], temperature=0.0, max_tokens=9))
        engine.step()
        engine.step()
        engine.cancel("gone")
    tokens = [token for _ in range(60) for output in engine.step() for token in output.tokens]
    assert not engine.has_work
    pool = engine.scheduler.tables.pool
    assert pool.num_free == pool.num_blocks
    assert len(tokens) > 10


def test_more_choices_share_their_prompt():
    engine = graph_engine(None)
    asked = [
        request("first", [1, 2, 3], temperature=0.0, max_tokens=20),
        request("many", list(range(20)), temperature=1.0, seed=3, n=3, max_tokens=6),
    ]
    check(engine, asked, arrivals=1)
    assert HostReason.ADMISSION not in engine.executors.counts


def test_a_prompt_in_the_prefix_cache_joins_too():
    engine = graph_engine(None)
    prompt = [i % 11 for i in range(40)]
    asked = [request(f"r{i}", prompt, temperature=0.0, max_tokens=12) for i in range(4)]
    check(engine, asked, arrivals=1)
    assert HostReason.ADMISSION not in engine.executors.counts


def test_a_cache_that_runs_full_preempts_on_the_host():
    engine = graph_engine(None, kv_tokens=96, max_num_seqs=4)
    check(engine, arriving(8, seed=4, longest=25, temperature=0.0), arrivals=2)


def test_a_request_that_needs_the_host_is_admitted_by_it():
    engine = graph_engine(None)
    asked = [
        request("first", [1, 2, 3], temperature=0.0, max_tokens=20),
        request("scored", [4, 5, 6], temperature=0.8, seed=1, prompt_logprobs=1, max_tokens=5),
        request("last", [7, 8, 9], temperature=0.0, max_tokens=5),
    ]
    check(engine, asked, arrivals=1)
    assert engine.executors.counts[HostReason.ADMISSION] > 0


class PlainAtFirst(FixedDepth):
    """Drafts after `count` decisions."""

    def __init__(self, depth: int, count: int) -> None:
        super().__init__(depth)
        self._count = count

    def decide(self, batch):
        self._count -= 1
        return [0] * len(batch) if self._count >= 0 else super().decide(batch)


@pytest.mark.parametrize("max_gap", [None, 12], ids=["at once", "a few in each step"])
def test_a_batch_starts_to_draft_without_the_host(max_gap):
    """The draft is the target, so that a draft cache that is not right would show in the acceptance."""
    model = tiny_model(config=SMALL, device=DEVICE)
    engine = graph_engine(draft_model(model, runner=GpuRunner, max_gap=max_gap), PlainAtFirst(3, 8))
    asked = [replace_tokens(one, 24) for one in arriving(4, seed=2, temperature=0.0)]
    result = check(engine, asked, arrivals=1)
    assert HostReason.DRAFT_BEHIND not in engine.executors.counts
    assert result.accepted > 0.8 * result.drafted > 0


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        pytest.param([19], ["draft prefill", (19, 2)], id="few rows"),
        pytest.param([19, 18], ["draft prefill", (19, 2), "draft prefill", (18, 2)], id="rows in flight do not count"),
        pytest.param([33], [(33, 0), "draft prefill"], id="many rows"),
    ],
)
def test_nothing_drafts_beside_many_prompt_rows(lengths, expected, monkeypatch):
    monkeypatch.setattr(prompt_load, "_FEW_SEQUENCES", 0)
    assert steps_with_prompts(lengths, monkeypatch) == expected


def test_few_sequences_draft_beside_many_prompt_rows(monkeypatch):
    """The sequence that joins gets its draft prefill beside a later step."""
    assert steps_with_prompts([33], monkeypatch) == [(33, 2), "draft prefill"]


def steps_with_prompts(lengths, monkeypatch) -> list[tuple[int, int] | str]:
    """Prompt rows and draft nodes of the steps with prompts of these lengths, and draft prefills, in the order in which their
    submission ends. 20 rows are many."""
    for module in (prompt_load, graph_scheduler, graph_executor):
        monkeypatch.setattr(module, "MANY_ROWS", 20)
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine, events = (
        graph_engine(proposer, depth=2, max_batched_tokens=64, kv_tokens=512),
        list[tuple[int, int] | str](),
    )
    submit, prefill = executor_of(engine)._submit_mixed, DraftPrefills.submit

    def submit_mixed(schedule, drafts):
        submit(schedule, drafts)
        events.append((schedule.num_tokens, schedule.shape.nodes))

    def submit_prefill(self, joining, *args):
        events.append("draft prefill")
        return prefill(self, joining, *args)

    monkeypatch.setattr(engine.graph, "_submit_mixed", submit_mixed)
    monkeypatch.setattr(DraftPrefills, "submit", submit_prefill)
    asked = [request("first", [1, 2, 3], temperature=0.0, max_tokens=24)]
    asked += [request(f"r{n}", [(i + n) % 7 for i in range(n)], temperature=0.0, max_tokens=9) for n in lengths]
    result = check(engine, asked, arrivals=1)
    assert HostReason.DRAFT_BEHIND not in engine.executors.counts
    assert result.accepted > 0.8 * result.drafted > 0
    return events


class RecordedPrompts(FixedDepth):
    """Records what it is told of prompts before each decision."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.rows: list[int] = []

    def expect_prompts(self, rows: int) -> None:
        self.rows.append(rows)


def test_the_policy_is_told_of_prompts_that_wait_or_are_in_flight():
    policy, proposer = RecordedPrompts(1), draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, policy, max_batched_tokens=32, kv_tokens=512)
    asked = [
        request("short", [1, 2, 3], temperature=0.0, max_tokens=20),
        request("long", [i % 7 for i in range(70)], temperature=0.0, max_tokens=3),
    ]
    check(engine, asked, arrivals=1)
    changes = [rows for rows, before in zip(policy.rows, [None, *policy.rows], strict=False) if rows != before]
    assert changes == [0, 70, 40, 10, 0], "two of 32 rows are of the other sequence"


def replace_tokens(one: Request, count: int) -> Request:
    return replace(one, sampling=replace(one.sampling, max_tokens=count))


@pytest.mark.parametrize("depth", [2, pytest.param(5, marks=pytest.mark.interpreted)])
def test_a_batch_that_drafts_is_joined_without_the_host(depth):
    """The draft is the target, so that a draft cache that is not right would show in the acceptance."""
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, depth=depth)
    first = request("first", [1, 2, 3], temperature=0.0, max_tokens=60)
    asked = [first, *(replace_tokens(one, 12) for one in arriving(6, seed=3, temperature=0.0))]
    result = check(engine, asked, arrivals=1)
    assert set(reasons(engine)) <= {HostReason.IDLE, HostReason.RESIZE, HostReason.PREFILL}, engine.executors.counts
    assert result.accepted > 0.8 * result.drafted


class PlainInTurns(FixedDepth):
    """Six plain decisions, six with drafts, and so on."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self._count = 0

    def decide(self, batch):
        self._count += 1
        return [0] * len(batch) if self._count % 12 < 6 else super().decide(batch)


class HostNgrams(NgramProposer):
    traits = ProposerTraits(can_miss_steps=True)


def test_sequences_that_draft_on_the_host_decode_in_graphs_until_then():
    engine = graph_engine(HostNgrams(), PlainInTurns(3), drafts_on_host=True)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 4, 5, 4], [6, 7, 8, 9]]
    asked = [request(f"r{i}", ids, max_tokens=30, **SAMPLINGS[i]) for i, ids in enumerate(prompts)]
    result = check(engine, asked, arrivals=2)
    assert result.drafted > 0
    assert engine.executors.counts[GRAPH] > engine.executors.counts[HostReason.PROPOSER] > 0


class DraftsAtFirst(FixedDepth):
    """Drafts in the first `count` decisions."""

    def __init__(self, depth: int, count: int) -> None:
        super().__init__(depth)
        self._count = count

    def decide(self, batch):
        self._count -= 1
        return super().decide(batch) if self._count >= 0 else [0] * len(batch)


def test_sequences_that_join_a_batch_without_drafts_need_no_draft_prefill(monkeypatch):
    submitted, submit = list[int](), DraftPrefills.submit
    monkeypatch.setattr(
        DraftPrefills,
        "submit",
        lambda self, joining, *args: submitted.append(len(joining)) or submit(self, joining, *args),
    )
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, DraftsAtFirst(2, 3))
    first = request("first", [1, 2, 3], temperature=0.0, max_tokens=60)
    result = check(engine, [first, *arriving(6, seed=3, temperature=0.0)], arrivals=1)
    assert result.drafted > 0
    assert sum(submitted) <= 2  # those that joined while it drafted


def test_a_request_without_speculation_joins_a_batch_that_drafts():
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, depth=3)
    first = request("first", [1, 2, 3], temperature=0.0, max_tokens=40)
    plain = replace(
        request("plain", [4, 5, 6], temperature=0.0, max_tokens=9), speculation=SpeculationParams(enabled=False)
    )
    result = check(engine, [first, plain], arrivals=1)
    assert HostReason.ADMISSION not in engine.executors.counts
    assert result.accepted > 20


def test_a_batch_keeps_its_drafts_when_it_shrinks():
    """Sequences end one by one: smaller batches take the draft's cache over."""
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, depth=2, max_num_seqs=6)
    asked = [request(f"r{i}", [1, 2, 3 + i], temperature=0.0, max_tokens=30 - 4 * i) for i in range(5)]
    result = check(engine, asked)
    assert HostReason.DRAFT_BEHIND not in engine.executors.counts
    assert result.accepted > 0.6 * result.drafted


class SometimesDrafts(FixedDepth):
    """Drafts in stretches of random length, as a policy that changes its mind."""

    def __init__(self, depth: int, seed: int) -> None:
        super().__init__(depth)
        self._dice, self._left, self._drafts = random.Random(seed), 0, False

    def decide(self, batch):
        if self._left == 0:
            self._left, self._drafts = self._dice.randint(1, 12), not self._drafts
        self._left -= 1
        return super().decide(batch) if self._drafts else [0] * len(batch)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_any_load_has_the_text_of_plain_decoding(seed):
    """Random lengths, arrivals, cancellations, drafts, samplings and caches that run full."""
    dice = random.Random(seed)
    proposer = draft_model(tiny_model(perturb=0.3, config=SMALL, device=DEVICE), runner=GpuRunner) if seed % 2 else None
    engine = graph_engine(
        proposer,
        SometimesDrafts(dice.randint(1, 4), seed),
        max_num_seqs=dice.choice([1, 2, 3, 6]),
        max_batched_tokens=dice.choice([12, 24, 64]),
        kv_tokens=dice.choice([128, 256, 1024]),
        prefix_caching=dice.random() < 0.5,
    )
    pending = arriving(10, seed, longest=dice.choice([8, 60]))
    tokens, cancelled = {one.id: [] for one in pending}, set()
    plain = plain_text(tiny_model(config=SMALL, device=DEVICE), pending)
    while pending or engine.has_work:
        while pending and dice.random() < 0.3:
            engine.add(pending.pop())
        if dice.random() < 0.02:
            cancelled.add(name := dice.choice(sorted(tokens)))
            engine.cancel(name)
        for output in engine.step():
            tokens[output.request_id].extend(output.tokens)
    for name, text in tokens.items():
        assert text == plain[name, 0] or name in cancelled
    pool = engine.scheduler.tables.pool
    pool.check()
    assert pool.num_free == pool.num_blocks
