"""How long a target waits for drafts: never longer than they are worth."""


def is_worth_waiting(ready: int, missing: int, gain: float, wait: float, step: float) -> bool:
    """Whether to wait `wait` seconds more for `missing` drafts when `ready` are there and a step takes `step` seconds.

    A draft adds `gain` tokens to its sequence's step. Waiting pays if

        (ready + missing) (1 + gain) / (step + wait)  >  (ready (1 + gain) + missing) / step
    """
    drafted = 1.0 + gain
    return (ready + missing) * drafted * step > (ready * drafted + missing) * (step + wait)
