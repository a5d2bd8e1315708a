"""Runs batches of several sizes, without and with drafts, and estimates the time of all measurements of a profile."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from paceline.bench.profiling.prompt_passes import BLOCK, MAX_PASS_SECONDS, MAX_ROWS, row_counts
from paceline.bench.profiling.recorder import RecordedRound, Recorder
from paceline.bench.profiling.time_estimate import Part, ProfilePassTimes, sequences
from paceline.core.clock import Clock
from paceline.core.sampling import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.llm import LLM

STEP_TOKENS = 16
"""Steps of a measured batch."""
FIRST_TOKENS = 4
"""Tokens of the run before it, which captures graphs."""
TOKENS_PER_STEP = 1.2
"""Tokens of a step with drafts, as random prompts give, for the estimate of the time."""
PASSES_PER_SIZE = 4
"""Passes that time one size, for the same estimate."""
PROMPT_TOKENS = 240
"""Tokens of the prompts of a measured batch, if the cache holds them: the time of a draft step depends on them."""
CPU_PROMPT_TOKENS = 32
"""The same on a CPU, where prompts take most of the time of a measurement."""
CONTEXTS, PROMPTS = "contexts", "prompts"
"""Names of the first and the last measurement."""
MIN_SIZES = 2
"""Sizes of batches that are measured in any case."""
DEPTH = 4
"""Depth of the measured drafts."""


def batch_sizes(most: int) -> list[int]:
    """Powers of two and `most`. The smallest and the largest come first, then the sizes half-way between, so that a curve of
    the first sizes is useful."""
    sizes = [1]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    sizes += [most] * (sizes[-1] < most)
    ordered, spans = dict.fromkeys((sizes[0], sizes[-1])), [(0, len(sizes) - 1)]
    for low, high in spans:  # grows while it is read
        middle = (low + high) // 2
        if middle > low:
            ordered[sizes[middle]] = None
            spans += [(low, middle), (middle, high)]
    return list(ordered)


def expected_parts(llm: "LLM", times: ProfilePassTimes, limit: float) -> list[Part]:
    """The measurements with the times that they should take. `limit` is the `seconds` of `measure_profile`."""
    scheduler, tokens = llm.engine.scheduler, prompt_tokens(llm)
    sizes, taken, computed = batch_sizes(scheduler.max_num_seqs), 0.0, 0
    parts = [Part(CONTEXTS, 2 * PASSES_PER_SIZE * times.most)]
    for number, batch in enumerate(sizes):
        for depth in _depths(llm):
            prompts = times.at(max(1, batch - computed) * tokens)
            computed = max(computed, batch)
            steps = FIRST_TOKENS + STEP_TOKENS * (1 + depth // 2)
            steps_seconds = steps / (TOKENS_PER_STEP if depth else 1.0) * times.at(batch * (1 + depth))
            is_left_out = number >= MIN_SIZES and taken >= limit
            parts.append(Part(_batch_name(batch, depth), 0.0 if is_left_out else prompts + steps_seconds))
        taken = sum(part.seconds for part in parts)
    passes = [times.at(rows) for rows in row_counts(min(MAX_ROWS, scheduler.max_batched_tokens))]
    longest = [seconds for seconds in passes if seconds <= MAX_PASS_SECONDS]
    return [*parts, Part(PROMPTS, PASSES_PER_SIZE * (sum(longest) + 2.0 * passes[-1]))]


def run_batches(
    llm: "LLM", sizes: Iterable[int], clock: Clock, deadline: float, begin: Callable[[str, bool], None]
) -> list[RecordedRound]:
    """Steps of batches of each size, without and with drafts. After the deadline only those of the first two sizes."""
    recorder = Recorder(clock)
    vocabulary, length = llm.engine.validator.limits.vocab_size, prompt_tokens(llm)
    with llm.engine.hooks.listening(recorder):
        for number, batch in enumerate(sizes):
            is_measured = number < MIN_SIZES or clock.now() < deadline
            for depth in _depths(llm):
                begin(_batch_name(batch, depth), is_measured)
                if not is_measured:
                    continue
                for is_counted in (False, True):  # the first run captures graphs
                    recorder.label = f"{batch}/{depth}" if is_counted else None
                    tokens = STEP_TOKENS * (1 + depth // 2) if is_counted else FIRST_TOKENS
                    llm.generate(
                        [[(97 * i + 31 * j + 7) % vocabulary for j in range(length)] for i in range(batch)],
                        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0),
                        speculation={"enabled": True, "max_depth": depth} if depth else {"enabled": False},
                        cache_salt="profile",  # batches share prompts: a prompt is computed once, if the cache holds it
                    )
        recorder.label = None
    return [
        round_ for round_ in recorder.rounds if round_.is_decode and round_.label.partition("/")[0] == str(round_.batch)
    ]


def _depths(llm: "LLM") -> tuple[int, ...]:
    return (0, DEPTH) if llm.engine.speculator.proposers else (0,)


def _batch_name(batch: int, depth: int) -> str:
    return sequences(batch) + ", with drafts" * bool(depth)


def prompt_tokens(llm: "LLM") -> int:
    """Tokens of the prompts of a measured batch: half of the cache and of the longest sequence are left for outputs."""
    cached = llm.engine.runner.num_blocks * BLOCK // llm.engine.scheduler.max_num_seqs
    most = CPU_PROMPT_TOKENS if llm.engine.runner.device.type == "cpu" else PROMPT_TOKENS
    return max(1, min(most, cached // 2, llm.engine.validator.limits.max_model_len // 2))
