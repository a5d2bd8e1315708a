"""The oracle of `autoscaling.py`: sizes of the target pool from the whole trace, by dynamic programming and simulation.

A fluid queue stands for the cluster: work arrives second by second, `size` workers serve it, and a request that waits longer
than the objective's TTFT misses it. Dynamic programming over sizes in steps of ten seconds finds the schedule with the least

    dollars + price_of_a_miss * misses

where a worker that is added is paid for its start-up time too. The simulator then runs the schedule, and a search over the
price finds the cheapest schedule that reaches the share. The oracle has the start-up time, the interval and the limit of the
other controllers; it differs from them only in what it knows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.planning.profile import WorkerProfile
from paceline.planning.traces.trace import Trace

Array = npt.NDArray[np.float64]
STEP = 10
"""Seconds of a size of the schedule: the interval of the controllers."""
DRAIN_SECONDS = 5.0
"""Time that a worker is paid for while it drains, about."""
BACKLOGS = np.concatenate([[0.0], np.geomspace(0.05, 600.0, 63)])
"""Queued work in seconds of one worker, at which the program is solved."""


@dataclass(frozen=True, slots=True)
class FluidLoad:
    """Work (seconds of one worker) and requests that arrive in each second."""

    work: Array
    requests: Array


def fluid_load(profile: WorkerProfile, trace: Trace) -> FluidLoad:
    """The work of prompts, without prefixes that occurred before, and of answers in batches of 32."""
    seconds = STEP * (int(trace.seconds // STEP) + 1)
    work, requests = np.zeros(seconds), np.zeros(seconds)
    row, attention = profile.pass_seconds.at(512) / 512, profile.prompt_context_seconds.value
    seen: set[tuple[int, int]] = set()
    for request in trace.requests:
        keys = [(request.copy, block) for block in request.blocks]
        cached = sum(key in seen for key in keys) * trace.block_tokens
        seen.update(keys)
        prompt = (request.prompt_tokens - cached) * row + attention * (request.prompt_tokens**2 - cached**2) / 2.0
        decode = request.output_tokens * profile.verify_seconds(32, 0, 32.0 * request.prompt_tokens) / 32
        work[int(request.arrival)] += prompt + decode
        requests[int(request.arrival)] += 1.0
    return FluidLoad(work, requests)


def missed(load: FluidLoad, sizes: Sequence[int], ttft: float, speed: float) -> float:
    """Misses of the fluid queue with `sizes` in steps of `STEP`; a worker does `speed` work in a second."""
    backlog = total = 0.0
    for second, (work, count) in enumerate(zip(load.work, load.requests, strict=True)):
        rate = speed * sizes[min(second // STEP, len(sizes) - 1)]
        total += count * _late(np.array(backlog + work), rate, ttft)
        backlog = max(0.0, backlog + work - rate)
    return float(total)


def _late(backlog: Array, rate: float | Array, ttft: float) -> Array:
    """Share of the requests of a second that wait longer than `ttft`, if the queue is `backlog` at its end."""
    waiting: Array = np.clip((backlog / rate - ttft) / 1.0, 0.0, 1.0)
    return waiting


def ready_sizes(
    load: FluidLoad, ttft: float, speed: float, most: int, start_seconds: float, price_of_a_miss: float
) -> list[int]:
    """Ready workers in each step, of the least cost; a price of 1 is that of a worker for a second."""
    sizes = np.arange(1, most + 1)
    rate = speed * sizes[:, None].astype(float)
    change = sizes[None, :] - sizes[:, None]  # [before, after]
    switching = np.maximum(change, 0) * start_seconds + np.maximum(-change, 0) * DRAIN_SECONDS
    steps = len(load.work) // STEP
    value = np.zeros((most, len(BACKLOGS)))
    value += price_of_a_miss * BACKLOGS / 10.0 / sizes[:, None]  # work that is left at the end
    choices = np.zeros((steps, most, len(BACKLOGS)), dtype=np.int16)
    for step in reversed(range(steps)):
        backlog, cost = np.tile(BACKLOGS, (most, 1)), STEP * np.tile(sizes[:, None].astype(float), len(BACKLOGS))
        for second in range(step * STEP, (step + 1) * STEP):
            if load.requests[second]:
                backlog = backlog + load.work[second]
                cost = cost + price_of_a_miss * load.requests[second] * _late(backlog, rate, ttft)
            backlog = np.maximum(0.0, backlog - rate)
        after = np.stack([np.interp(backlog[i], BACKLOGS, value[i]) for i in range(most)])
        total = switching[:, :, None] + (cost + after)[None, :, :]  # [before, after, backlog]
        choices[step] = total.argmin(axis=1)
        value = np.take_along_axis(total, choices[step][:, None, :].astype(np.int64), axis=1)[:, 0, :]
    at = int(value[:, 0].argmin())  # the workers of the start are ready at once
    backlog_now, found = 0.0, []
    for step in range(steps):
        at = int(choices[step][at, int(np.abs(BACKLOGS - backlog_now).argmin())])
        found.append(at + 1)
        for second in range(step * STEP, (step + 1) * STEP):
            backlog_now = max(0.0, backlog_now + float(load.work[second]) - speed * (at + 1))
    return found


def as_schedule(ready: Sequence[int], start_seconds: float) -> list[tuple[float, int]]:
    """Sizes to request, so that the workers are ready in time: (time, workers)."""
    early = math.ceil(start_seconds / STEP)
    padded = [*ready, *([ready[-1]] * early)]
    return [(STEP * (step - 0.5), max(padded[step : step + early + 1])) for step in range(len(ready))]
