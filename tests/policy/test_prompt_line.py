from collections.abc import Sequence
from dataclasses import dataclass

from paceline.policy.prompt_line import AGEING, SHORT_ROWS, PromptLine, length_class


@dataclass(eq=False)
class Waiting:
    id: int
    num_uncomputed: int
    arrival: float = 0.0
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0


class Steps:
    """Steps of `rows` prompt rows each."""

    def __init__(self, rows: int) -> None:
        self.line, self.rows = PromptLine[Waiting](), rows
        self.begun: list[Waiting] = []

    def add(self, *prompts: Waiting) -> None:
        for prompt in prompts:
            self.line.add(prompt, prompt.num_uncomputed)

    def step(self, refused: Sequence[Waiting] = ()) -> dict[int, int]:
        """The rows of each prompt, in the order of their turns. The cache has no room for the `refused` prompts."""
        rows: dict[int, int] = {}
        taken: dict[Waiting, int] = {}
        turns, left = self.line.turns(self.begun, self.rows), self.rows
        while (turn := turns.next(left)) is not None:
            prompt = turn.prompt
            if not self.line.has_begun(prompt):
                if prompt in refused:
                    if not turns.refuse(turn):
                        turns.close()
                    turns.took(prompt, 0, is_over=True)
                    continue
                self.line.begin(prompt)
                self.begun.append(prompt)
            count = min(turn.most, prompt.num_uncomputed - taken.get(prompt, 0))
            taken[prompt] = rows[prompt.id] = taken.get(prompt, 0) + count
            left -= count
            turns.took(prompt, count, is_over=taken[prompt] == prompt.num_uncomputed)
        for prompt, count in taken.items():
            prompt.num_uncomputed -= count
            if not prompt.num_uncomputed:
                self.begun.remove(prompt)
                self.line.discard(prompt)
        return rows


def test_short_prompts_go_before_long_ones() -> None:
    steps = Steps(256)
    steps.add(Waiting(0, 7000))
    assert steps.step() == {0: 256}
    steps.add(Waiting(1, 300, arrival=1.0), Waiting(2, 100, arrival=2.0))
    assert steps.step() == {2: 100, 1: 156}
    assert steps.step() == {1: 144, 0: 112}
    assert steps.step() == {0: 256}


def test_prompts_of_about_the_same_length_keep_their_order() -> None:
    assert [length_class(rows) for rows in (1, SHORT_ROWS, SHORT_ROWS + 1, 2 * SHORT_ROWS, 2 * SHORT_ROWS + 1)] == [
        0,
        0,
        1,
        1,
        2,
    ]
    steps = Steps(256)
    steps.add(Waiting(0, 250), Waiting(1, 200, arrival=1.0), Waiting(2, 500, arrival=2.0), Waiting(3, 400, arrival=3.0))
    assert [list(steps.step()) for _ in range(5)] == [[0, 1], [1, 2], [2], [2, 3], [3]]


def test_a_long_prompt_gets_its_share_while_short_ones_keep_arriving() -> None:
    steps = Steps(256)
    long = Waiting(0, 2000)
    steps.add(long)
    got = {True: 0, False: 0}
    for number in range(1, 200):
        steps.add(Waiting(number, 256, arrival=float(number)))
        for prompt, rows in steps.step().items():
            got[prompt == 0] += rows
        if not long.num_uncomputed:
            break
    assert not long.num_uncomputed
    assert abs(got[False] - AGEING * got[True]) <= AGEING * 256


def test_a_lower_priority_number_goes_first() -> None:
    steps = Steps(100)
    steps.add(Waiting(0, 50), Waiting(1, 2000, arrival=1.0, priority=-1))
    assert steps.step() == {1: 100}


def test_tenants_share_the_rows_by_weight() -> None:
    steps = Steps(400)
    steps.add(*[Waiting(i, 200, arrival=float(i), tenant="many", weight=3.0) for i in range(100)])
    steps.add(*[Waiting(100 + i, 200, arrival=100.0 + i, tenant="few") for i in range(50)])
    got = {"many": 0, "few": 0}
    for _ in range(30):
        for prompt, rows in steps.step().items():
            got["few" if prompt >= 100 else "many"] += rows
    assert abs(got["many"] - 3 * got["few"]) <= 400


def test_a_tenant_that_was_away_earns_nothing() -> None:
    steps = Steps(100)
    steps.add(*[Waiting(i, 100, arrival=float(i), tenant="a") for i in range(50)])
    for _ in range(20):
        steps.step()
    steps.add(*[Waiting(50 + i, 100, arrival=50.0 + i, tenant="b") for i in range(20)])
    got = [0, 0]
    for _ in range(10):
        for prompt, rows in steps.step().items():
            got[prompt >= 50] += rows
    assert got == [500, 500]


def test_a_prompt_without_room_is_passed_for_a_while() -> None:
    steps = Steps(256)
    large = Waiting(0, 512)
    steps.add(large)
    passed = 0
    for number in range(1, 50):
        steps.add(Waiting(number, 256, arrival=float(number)))
        if not steps.step(refused=[large]):
            break
        passed += 1
    assert passed == AGEING * 512 // 256
    assert steps.line.next is large
    assert list(steps.step()) == [0]  # there is room


def test_a_prompt_that_ends_leaves_nothing() -> None:
    steps = Steps(64)
    first, second = Waiting(0, 1000), Waiting(1, 100, arrival=1.0)
    steps.add(first, second)
    steps.step()
    steps.line.discard(first)
    steps.line.discard(second)
    assert (len(steps.line), list(steps.line), steps.line.next, steps.line.owed) == (0, [], None, {})


def test_only_begun_prompts_get_rows_where_no_other_may_begin() -> None:
    steps = Steps(64)
    steps.add(Waiting(0, 1000))
    steps.step()
    steps.add(Waiting(1, 10, arrival=1.0))
    turns = steps.line.turns(steps.begun, 64, may_begin=False)
    turn = turns.next(64)
    assert turn is not None
    assert turn.prompt.id == 0
    assert steps.line.turns((), 64, may_begin=False).next(64) is None
