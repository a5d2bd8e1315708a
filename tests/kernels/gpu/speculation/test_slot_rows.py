import torch

from paceline.kernels.gpu.speculation.accept import DeviceState
from paceline.kernels.gpu.speculation.slot_rows import commit_rows, place_slots
from tests.kernels.gpu.cases import on_device


def state(lengths: list[int], last: list[list[int]]) -> DeviceState:
    return DeviceState(*on_device(torch.tensor(lengths, dtype=torch.int32), torch.tensor(last)))


def test_decoding_rows_come_from_their_slots() -> None:
    held = state([5, 40, 9, 2], [[1, 2], [3, 4], [5, 6], [7, 8]])
    slots, tokens, positions = on_device(torch.tensor([3, 0, 1]), torch.full((6,), -7), torch.full((6,), -7))
    [contexts] = on_device(torch.full((4,), -7, dtype=torch.int32))
    place_slots(held, None, slots, tokens, positions, contexts, max_position=30)
    assert tokens.tolist() == [8, 2, 4, -7, -7, -7]
    assert positions.tolist() == [1, 4, 29, -7, -7, -7]
    assert contexts.tolist() == [1, 4, 39, -7]


def test_drafts_follow_the_newest_token_of_their_slot() -> None:
    held = state([5, 40, 9], [[1, 2], [3, 4], [5, 6]])
    drafts, slots = on_device(torch.tensor([[10, 11], [12, 13], [14, 15]]), torch.tensor([2, 1]))
    tokens, positions = on_device(torch.full((7,), -7), torch.full((7,), -7))
    [contexts] = on_device(torch.full((3,), -7, dtype=torch.int32))
    place_slots(held, drafts, slots, tokens, positions, contexts, max_position=41)
    assert tokens.tolist() == [6, 14, 15, 4, 12, 13, -7]
    assert positions.tolist() == [8, 9, 10, 39, 40, 40, -7]
    assert contexts.tolist() == [8, 39, -7]


def test_a_pass_of_prompts_alone_has_no_decoding_rows() -> None:
    held = state([5], [[1, 2]])
    slots, tokens, positions = on_device(torch.zeros(0, dtype=torch.int64), torch.full((2,), 3), torch.full((2,), 4))
    [contexts] = on_device(torch.full((1,), 5, dtype=torch.int32))
    place_slots(held, None, slots, tokens, positions, contexts, max_position=30)
    assert (tokens.tolist(), positions.tolist(), contexts.tolist()) == ([3, 3], [4, 4], [5])


def test_picks_become_the_newest_tokens_of_their_slots() -> None:
    held = state([5, 9, 2, 2], [[1, 2], [5, 6], [0, 0], [0, 0]])
    # Row 0 decodes in slot 1; rows 1 and 2 are a prompt that ends in slot 2
    rows, slots, tokens, positions, picks = on_device(
        torch.tensor([0, 2]),
        torch.tensor([1, 2]),
        torch.tensor([6, 20, 21, 0]),
        torch.tensor([8, 0, 1, 0]),
        torch.tensor([77, 88]),
    )
    commit_rows(held, rows, slots, tokens, positions, picks)
    assert held.lengths.tolist() == [5, 10, 3, 2]
    assert held.last.tolist() == [[1, 2], [6, 77], [21, 88], [0, 0]]


def test_more_rows_than_one_program_takes() -> None:
    count = 300
    held = state([2] * count, [[0, i] for i in range(count)])
    slots, tokens, positions = on_device(
        torch.arange(count).flip(0), torch.zeros(count).long(), torch.zeros(count).long()
    )
    [contexts] = on_device(torch.zeros(count, dtype=torch.int32))
    place_slots(held, None, slots, tokens, positions, contexts, max_position=30)
    assert tokens.tolist() == list(range(count))[::-1]
    commit_rows(held, torch.arange(count, device=tokens.device), slots, tokens, positions, tokens + 1)
    assert held.last.tolist() == [[i, i + 1] for i in range(count)]
    assert held.lengths.tolist() == [3] * count
