"""Times the passes that a profile needs, and estimates the time of all its measurements.

`run_batches` runs batches of several sizes, without and with drafts. Passes over prompts are timed by rows, attention to
earlier tokens, and the prefill of a draft.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from paceline.core.clock import Clock
from paceline.core.request import SamplingParams
from paceline.tools.footprint import draft_parts
from paceline.tools.profile.measurement import Part, ProfilePassTimes, sequences
from paceline.tools.profile.recorder import RecordedRound, Recorder

if TYPE_CHECKING:
    from paceline.engine.start import LLM
    from paceline.models.runner import ModelRunner, Span

BLOCK = 16
MAX_ROWS = 8192
"""Most rows of a measured pass. The engine may have a lower limit."""
MIDDLE_ROWS = 256
"""Rows from which also the sizes half-way between powers of two are measured."""
MAX_PASS_SECONDS = 1.0
"""A pass that takes longer is the last that is measured."""
CHUNK = 256
"""Rows of one prompt. A pass of more rows computes several prompts, as steps under load do."""
DRAFT_PREFILL_ROWS = 2048
MAX_CONTEXT = 4096
"""Tokens before the prompt rows with which attention is measured, at most."""


def pass_seconds(runner: "ModelRunner", max_rows: int, clock: Clock, attention: float) -> dict[int, float]:
    """Time of a pass over prompts by rows, without attention to earlier tokens. `max_rows` is the limit of the engine, and
    `attention` is the result of `attention_seconds`."""
    from paceline.engine.sizing import median_seconds  # imports torch

    passes: dict[int, float] = {}
    for rows in row_counts(min(MAX_ROWS, max_rows, runner.num_blocks * BLOCK)):
        spans = _spans(runner.num_blocks, rows)
        seconds = median_seconds(runner, spans, clock)
        passes[rows] = max(1e-6, seconds - attention * sum(len(span.tokens) ** 2 for span in spans) / 2.0)
        if seconds > MAX_PASS_SECONDS:
            break
    return passes


def row_counts(most: int) -> list[int]:
    """Powers of two up to `most`, and from `MIDDLE_ROWS` on the counts half-way between them."""
    counts = [1 << i for i in range(most.bit_length())]
    return sorted({*counts, *(3 * count // 2 for count in counts if count >= MIDDLE_ROWS and 3 * count // 2 <= most)})


def attention_seconds(runner: "ModelRunner", clock: Clock) -> float:
    """Time per prompt row and token before it."""
    from paceline.engine.sizing import median_seconds
    from paceline.models.runner import Span

    longest = min((runner.num_blocks - 1) * BLOCK, runner.model.config.max_position - 1, MAX_CONTEXT) // BLOCK * BLOCK
    rows = min(CHUNK, longest // 4)
    before = (longest - rows) // BLOCK * BLOCK
    if rows < BLOCK or before < rows:
        return 0.0
    blocks = range(-(-(before + rows) // BLOCK))
    first, later = (
        median_seconds(runner, [Span(blocks, start, [0] * rows, num_logits=1)], clock) for start in (0, before)
    )
    return max(0.0, later - first) / (rows * before)


def draft_prefill_seconds(llm: "LLM", clock: Clock) -> float:
    """Time per prompt token that the draft computes before it drafts. 0 for a method without a cache of its own."""
    from paceline.engine.sizing import median_seconds
    from paceline.engine.start import pick_method
    from paceline.models.heads.eagle import EagleRunner
    from paceline.models.runner import ModelRunner

    engine, total = llm.engine, 0.0
    rows = min(DRAFT_PREFILL_ROWS, engine.scheduler.max_batched_tokens)
    method = pick_method(llm.config.speculation, dict(engine.speculator.proposers))
    for runner in draft_parts(engine, [method]).runners:
        rows = min(rows, runner.num_blocks * BLOCK)
        if isinstance(runner, EagleRunner):
            total += _head_seconds(runner, rows, clock) / rows
        elif isinstance(runner, ModelRunner):
            total += median_seconds(runner, _spans(runner.num_blocks, rows), clock) / rows
    return total


def _spans(num_blocks: int, rows: int) -> "list[Span]":
    """Prompts of up to `CHUNK` rows that share no blocks."""
    from paceline.models.runner import Span

    counts = [min(CHUNK, rows - start) for start in range(0, rows, CHUNK)]
    firsts = range(0, num_blocks, CHUNK // BLOCK)
    return [
        Span(range(first, min(num_blocks, first + CHUNK // BLOCK)), 0, [0] * count, num_logits=1)
        for first, count in zip(firsts, counts, strict=False)
    ]


def _head_seconds(runner: Any, rows: int, clock: Clock) -> float:
    """Median time in which an EAGLE head computes that many rows."""
    from statistics import median

    device, states = runner.model.device, runner.model.zero_states(rows)
    spans, seconds = _spans(runner.num_blocks, rows), []
    for _ in range(4):
        before = clock.now()
        runner.forward(spans, states)
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)
        seconds.append(clock.now() - before)
    return median(seconds[1:])  # The first pass compiles


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
