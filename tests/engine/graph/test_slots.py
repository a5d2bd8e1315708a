"""Slots of the graph executor: which sequence is where, and its sampling parameters on the device."""

from dataclasses import replace

import pytest
import torch

from paceline.core.request import SamplingParams, SpeculationParams
from paceline.core.sequence import Sequence, Status
from paceline.engine.graph.inflight import add_scores
from paceline.engine.graph.slot_params import Slot, SlotParams, fits_slot
from paceline.engine.graph.slots import DeviceSlots, SlotTable
from paceline.engine.step.step import SequenceResult
from paceline.kernels.gpu.speculation.edits import IN_PROMPT
from paceline.kernels.gpu.speculation.scores import COLUMNS, score_rows, score_scratch, score_tokens
from paceline.speculation.verification.verification import PLAIN, Verdict

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.5, seed=1)
CUT = SamplingParams(temperature=0.5, top_k=3, seed=1)


def sequence(number: int) -> Sequence:
    one = Sequence(number, f"r{number}", [1, 2], 2, GREEDY, SpeculationParams(), seed=0)
    one.status = Status.RUNNING
    return one


def test_a_sequence_takes_the_lowest_free_slot() -> None:
    table, members = SlotTable(), [sequence(i) for i in range(4)]
    assert [table.join(one, [one.id]) for one in members] == [0, 1, 2, 3]
    for i in (2, 0):
        members[i].status = Status.FINISHED
    assert table.remove_ended() == {0: members[0], 2: members[2]}
    assert table.blocks == [(), [1], (), [3]]
    assert [table.join(sequence(i), [i]) for i in (7, 8, 9)] == [0, 2, 4]
    assert [one.id for one in table.members()] == [7, 1, 8, 3, 9]


def test_there_are_no_slots_after_the_last_one_in_use() -> None:
    table, members = SlotTable(), [sequence(i) for i in range(4)]
    for one in members:
        table.join(one, ())
    for i in (1, 2, 3):
        members[i].status = Status.FINISHED
    table.remove_ended()
    assert len(table) == 1
    assert table.join(sequence(5), ()) == 1
    assert members[0] in table
    assert members[1] not in table


def params(contents: dict[int, SamplingParams]) -> SlotParams:
    result = SlotParams(4, CPU)
    for slot, sampling in contents.items():
        result.set(slot, Slot((1, 2), sampling, 1 << 63, 0))
    return result


@pytest.mark.parametrize(
    ("contents", "kind"),
    [({}, "greedy"), ({0: GREEDY, 2: SAMPLED}, "sampled"), ({1: CUT, 2: SAMPLED}, "truncated")],
)
def test_the_simplest_sampling_that_serves_every_slot(contents: dict[int, SamplingParams], kind: str) -> None:
    result = params(contents)
    result.upload()
    assert result.sampling.kind == kind


def test_an_emptied_slot_is_greedy_again() -> None:
    result = params({1: CUT})
    result.upload()
    result.clear(1)
    assert result.sampling.kind == "truncated"  # as on the device
    result.upload()
    assert result.sampling.kind == "greedy"
    assert result.on_device.temperature.tolist() == [0.0] * 4
    assert result.on_device.top_p.tolist() == [1.0] * 4


def test_the_features_that_a_slot_uses() -> None:
    assert not params({0: SAMPLED}).sampling.has_features
    for changes in ({"repetition_penalty": 1.2}, {"frequency_penalty": 0.1}, {"logit_bias": {3: 1.0}}):
        result = SlotParams(2, CPU, vocab_size=8)
        result.set(1, Slot((1, 2), replace(GREEDY, **changes), 0, 0))
        result.upload()
        assert result.sampling == ("greedy", True, False)
    scored = SlotParams(2, CPU)
    scored.set(1, Slot((1, 2), replace(GREEDY, logprobs=0), 0, 0))
    scored.upload()
    assert scored.sampling == ("greedy", False, True)
    assert scored.num_top.tolist() == [-1, 0]


def test_penalties_know_the_text_of_the_sequence_that_enters_a_slot() -> None:
    result = SlotParams(2, CPU, vocab_size=8)
    for _ in range(2):
        result.set(1, Slot((1, 2, 2, 7, 5, 7), replace(GREEDY, presence_penalty=0.1), 0, 0, num_prompt=3))
    assert result.edits.seen[1].tolist() == [0, IN_PROMPT, IN_PROMPT, 0, 0, 1, 0, 2]
    assert not result.edits.seen[0].any()


def test_end_tokens_are_blocked_before_a_position() -> None:
    short = replace(GREEDY, min_tokens=3, blocked_ids=(4, 6))
    result = params({1: short})
    result.set(2, Slot((1, 2, 3, 4, 5), short, 0, 0, num_prompt=2))  # has as many
    result.set(3, Slot((1, 2, 3, 4), short, 0, 0, num_prompt=2))
    result.upload()
    assert result.edits.num_blocked.tolist() == [0, 2, 0, 2]
    assert result.edits.first_end[[1, 3]].tolist() == [3, 5]
    assert result.edits.blocked[3, :2].tolist() == [4, 6]


def test_lists_that_a_slot_cannot_hold() -> None:
    assert fits_slot(SamplingParams(logit_bias=dict.fromkeys(range(512), 1.0)), 1000)
    assert not fits_slot(SamplingParams(logit_bias=dict.fromkeys(range(513), 1.0)), 1000)
    assert not fits_slot(SamplingParams(min_tokens=1, blocked_ids=tuple(range(65))), 1000)
    assert fits_slot(SamplingParams(blocked_ids=tuple(range(65))), 1000)
    assert not fits_slot(SamplingParams(min_tokens=1, blocked_ids=tuple(range(8))), 8)


def test_log_probabilities_go_to_the_sequences_that_want_them() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    tokens, wanted, first_rows = [(3, 4), (5,), (7,)], (5, None, 2), [0, 2, 4]
    scored = torch.zeros(6, COLUMNS, dtype=torch.int32)
    picked = torch.tensor([3, 4, 5, -1, 7, -1]).to(DEVICE)
    number = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    on_device = scored.to(DEVICE)
    rows, scratch = torch.arange(6, device=DEVICE), score_scratch(6, 40, DEVICE)
    score_tokens(logits.to(DEVICE), rows, picked, number, 6, scratch, on_device)
    results = []
    for i, some in enumerate(tokens):
        asking = replace(sequence(i), sampling=replace(GREEDY, logprobs=wanted[i]))
        results.append(SequenceResult(asking, 1, Verdict((), some, PLAIN)))
    results.append(SequenceResult(replace(sequence(9), sampling=replace(GREEDY, logprobs=1)), 8, None))
    add_scores(results, [*first_rows, 6], on_device.cpu())
    assert results[0].scores == tuple(score_rows(logits[:2].to(DEVICE), [3, 4], 5))
    assert results[2].scores == tuple(score_rows(logits[4:5].to(DEVICE), [7], 2))
    assert results[1].scores is results[3].scores is None


def test_batches_of_all_sizes_share_one_memory() -> None:
    largest = DeviceSlots(4, CPU)
    small = DeviceSlots(2, CPU, largest)
    largest.load([Slot((1, 2, 3), CUT, 5, 0), Slot((4, 5), GREEDY, 5, 0), Slot((6, 7), SAMPLED, 5, 1)])
    assert small.state.lengths.tolist() == [3, 2]
    assert small.state.last.tolist() == [[2, 3], [4, 5]]
    assert small.tensors.top_k.tolist() == [3, SamplingParams().top_k]
    assert small.sampling.kind == "truncated"
    small.state.lengths[0] += 1
    assert largest.state.lengths.tolist() == [4, 2, 2, 2]
