"""A draft model under rides that fork, are cut back and share: each must see its own text and no other."""

import pytest

from paceline.core.sampling import SamplingParams
from paceline.runtime.draft_worker.core import Facts, Ride
from tests.fakes import tiny_model
from tests.runtime.pools import model_core

BLOCKS = 64


def ride(number, ids, committed=None, **sampling):
    facts = Facts(SamplingParams(**{"temperature": 1.0, **sampling}), 5, 0, 1, "coupled", "")
    return Ride(number, facts, list(ids), len(ids) if committed is None else committed)


def draft(core, *rides, count=4):
    for _ in range(count):
        for one, drawn in zip(rides, core.step(rides), strict=True):
            assert drawn is not None
            one.ids.append(drawn.token)
    return [one.ids[-count:] for one in rides]


def fresh(ids, count=4):
    return draft(model_core(tiny_model(), BLOCKS), ride(0, ids), count=count)[0]


@pytest.mark.parametrize("length", [3, 15, 16, 17, 30, 32, 33])
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_fork_sees_its_own_text(length, accepted):
    """Wherever the fork falls in a block: parent and children draft as each would by itself, all in one batch."""
    core = model_core(tiny_model(), BLOCKS)
    prompt = [(7 * i) % 40 for i in range(length)]
    main = ride(0, prompt)
    draft(core, main)
    children = []
    for number, token in ((1, 39), (2, 38)):
        children.append(ride(number, [*prompt, *main.ids[length : length + accepted], token], length))
        core.fork(main, children[-1])
        assert children[-1].num_cached >= length, "the text they share is not computed again"
    before = [list(one.ids) for one in (main, *children)]
    assert draft(core, main, *children) == [fresh(ids) for ids in before]
    core.close([main, *children])
    core._tables.pool.check()
    assert core.num_free_blocks == BLOCKS


@pytest.mark.parametrize("cut", [20, 21, 31, 32, 33])
def test_a_ride_that_is_cut_back_forgets(cut):
    core = model_core(tiny_model(), BLOCKS)
    main = ride(0, range(20))
    draft(core, main, count=20)
    core.cut(main, cut)
    main.ids.append(39)
    main.num_committed = len(main.ids)
    expected = fresh(list(main.ids))
    assert draft(core, main) == [expected]


def test_guesses_are_never_shared_as_a_prefix():
    """Only committed blocks are announced: another sequence of the same salt finds those and nothing else."""
    core = model_core(tiny_model(), BLOCKS)
    main = ride(0, range(20))
    draft(core, main, count=20)
    other = ride(1, main.ids[:36])
    core.step([other])
    assert core._tables.pool.num_cached == 2, "one block of the first prompt, one more of the second"
    salted = Ride(2, Facts(SamplingParams(), 5, 0, 1, "coupled", "another tenant"), list(range(20)), 20)
    core.step([salted])
    assert core._tables.pool.num_cached == 3


def test_long_prompts_come_in_chunks_beside_others():
    core = model_core(tiny_model(), BLOCKS, max_rows=16)
    short, long = ride(0, [1, 2]), ride(1, [(3 * i) % 40 for i in range(50)])
    for _ in range(3):
        drawn = core.step([short, long])
        assert drawn[0] is not None
        assert drawn[1] is None
        short.ids.append(drawn[0].token)
    drawn = core.step([short, long])
    assert drawn[1] is not None
    assert drawn[1].token == fresh(list(long.ids), 1)[0]


def test_no_room_is_no_token_and_no_harm():
    core = model_core(tiny_model(), num_blocks=2)
    big, small = ride(0, range(30)), ride(1, range(20))
    assert core.step([big])[0] is not None
    assert core.step([small]) == [None]
    core.close([big])
    assert core.step([small])[0] is not None
    assert core.step([ride(2, [1] * 600)]) == [None], "past the model's window"
