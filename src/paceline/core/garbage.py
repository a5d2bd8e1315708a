"""Pauses of the garbage collector, for processes that serve."""

import gc


def keep_loaded() -> None:
    """What was loaded is here to stay. Collections that look through all of it hold everything up for tens of milliseconds, now
    and then; from here on they look at what is made later."""
    gc.collect()
    gc.freeze()
