"""Slots of the graph executor: which sequence is where, and its sampling parameters on the device."""

import pytest
import torch

from paceline.core.request import SamplingParams, SpeculationParams
from paceline.core.sequence import Sequence, Status
from paceline.engine.graph.slots import DeviceSlots, Slot, SlotParams, SlotTable

CPU = torch.device("cpu")
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
    assert result.sampling == kind


def test_an_emptied_slot_is_greedy_again() -> None:
    result = params({1: CUT})
    result.upload()
    result.clear(1)
    assert result.sampling == "truncated"  # as on the device
    result.upload()
    assert result.sampling == "greedy"
    assert result.on_device.temperature.tolist() == [0.0] * 4
    assert result.on_device.top_p.tolist() == [1.0] * 4


def test_batches_of_all_sizes_share_one_memory() -> None:
    largest = DeviceSlots(4, CPU)
    small = DeviceSlots(2, CPU, largest)
    largest.load([Slot((1, 2, 3), CUT, 5, 0), Slot((4, 5), GREEDY, 5, 0), Slot((6, 7), SAMPLED, 5, 1)])
    assert small.state.lengths.tolist() == [3, 2]
    assert small.state.last.tolist() == [[2, 3], [4, 5]]
    assert small.tensors.top_k.tolist() == [3, SamplingParams().top_k]
    assert small.sampling == "truncated"
    small.state.lengths[0] += 1
    assert largest.state.lengths.tolist() == [4, 2, 2, 2]
