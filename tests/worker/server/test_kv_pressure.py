"""The depth limit under preemptions."""

from dataclasses import replace

from paceline.core.request import SpeculationFlags
from paceline.core.status import EngineStatus
from paceline.worker.server.symptoms import KvPressure

STATUS = EngineStatus(3, 1, 10, 100, 2, 1, SpeculationFlags(True, "pool", 4), ())


def test_preemptions_limit_the_depth_until_they_end() -> None:
    pressure, flags = KvPressure(), SpeculationFlags(max_depth=6)
    changed = [pressure.observe(replace(STATUS, preemptions=2 + i), 10 * i) for i in range(4)]
    assert changed == [False, False, False, True]
    assert [symptom.name for symptom in pressure.active] == ["kv_pressure"]
    assert pressure.limit(flags).max_depth == 1
    assert pressure.limit(SpeculationFlags(max_depth=0)).max_depth == 0
    ended = [pressure.observe(replace(STATUS, preemptions=5), 100 + 10 * i) for i in range(3)]
    assert ended == [False, False, True]
    assert pressure.limit(flags) is flags


def test_preemptions_without_speculation_do_not_count() -> None:
    pressure = KvPressure()
    off = replace(STATUS, flags=SpeculationFlags(False, "pool", 4))
    assert not any(pressure.observe(replace(off, preemptions=i), 10 * i) for i in range(8))


def test_a_long_step_changes_nothing_and_an_idle_engine_ends_the_limit() -> None:
    pressure, flags = KvPressure(), SpeculationFlags(max_depth=4)
    for i in range(4):
        pressure.observe(replace(STATUS, preemptions=5 * i), 10 * i)
    last = replace(STATUS, preemptions=15)
    for _ in range(9):
        pressure.observe(last, 30)
    assert pressure.limit(flags).max_depth == 1
    idle = replace(last, running=0, waiting=0)
    assert [pressure.observe(idle, 30) for _ in range(3)] == [False, False, True]
    assert pressure.active == ()
    assert pressure.limit(flags) == flags
