"""Pauses of the garbage collector, for processes that serve."""

import gc

YOUNG = 10_000
"""Objects by which there must be more than before to look through the young ones. A step of many sequences makes more than
Python's 700, and they are freed with the next: looked through in every step, nothing is found."""


def keep_loaded() -> None:
    """What was loaded is here to stay. Collections that look through all of it hold everything up for tens of milliseconds, now
    and then; from here on they look at what is made later, and less often."""
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(YOUNG, *older)
