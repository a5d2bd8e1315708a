"""Rows of a pass, and the slots that accepted ones move to."""

from paceline.core.request import SamplingParams, SpeculationParams
from paceline.core.sequence import BLOCK_SIZE, Origin, Sequence
from paceline.engine.host import path_moves, span_of
from paceline.engine.step.step import Schedule, Scheduled
from paceline.kv.block_tables import BlockTables
from paceline.speculation.drafts.drafts import Draft
from paceline.speculation.verification.verification import Verdict


def sequence_of(num_tokens: int, num_computed: int, number: int = 0) -> Sequence:
    sequence = Sequence(
        id=number,
        request_id="r",
        ids=list(range(100, 100 + num_tokens)),
        num_prompt=num_tokens,
        sampling=SamplingParams(),
        speculation=SpeculationParams(),
        seed=0,
    )
    sequence.num_computed = num_computed
    return sequence


def verdict(*path: int) -> Verdict:
    return Verdict(path, (0,) * (len(path) + 1), (*(Origin.ACCEPTED,) * len(path), Origin.BONUS))


def test_a_chunk_of_a_prompt_asks_for_no_logits() -> None:
    span = span_of(Scheduled(sequence_of(20, 4), 6, 0), Draft(), [7, 8])
    assert (span.context_len, span.tokens, span.num_logits) == (4, [104, 105, 106, 107, 108, 109], 0)
    assert (span.positions, span.ancestors, span.blocks) == (None, None, [7, 8])


def test_a_chain_follows_the_newest_token() -> None:
    span = span_of(Scheduled(sequence_of(9, 8), 1, 2), Draft((5, 6), (-1, 0)), [0])
    assert (span.tokens, span.num_logits) == ([108, 5, 6], 3)
    assert (span.positions, span.ancestors) == (None, None)


def test_nodes_of_a_tree_stand_at_their_depth_and_see_their_branch() -> None:
    draft = Draft((5, 6, 7), (-1, -1, 1))
    span = span_of(Scheduled(sequence_of(9, 8), 1, 3), draft, [0])
    assert span.positions == [8, 9, 9, 10]
    assert span.ancestors == [0b0001, 0b0011, 0b0101, 0b1101]


def test_an_accepted_path_closes_up_across_blocks() -> None:
    tables = BlockTables(8)
    plain, tree, prompt = (sequence_of(BLOCK_SIZE, BLOCK_SIZE - 1, number) for number in range(3))
    for sequence in (plain, tree, prompt):
        tables.open(sequence.id, sequence.ids, "")
        tables.grow(sequence.id, BLOCK_SIZE + 6)
    plan = Schedule(tuple(Scheduled(sequence, 1, 6) for sequence in (plain, tree, prompt)))
    second = tables.blocks(tree.id)[1] * BLOCK_SIZE
    sources, targets = path_moves(plan, {plain.id: verdict(0, 1), tree.id: verdict(0, 2, 5)}, tables)
    assert (sources, targets) == ([second + 2, second + 5], [second + 1, second + 2])
