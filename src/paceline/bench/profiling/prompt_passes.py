"""Times passes over prompts: by rows, attention to earlier tokens, and the prefill of a draft."""

from typing import TYPE_CHECKING, Any

from paceline.bench.profiling.memory_reads import draft_parts
from paceline.core.clock import Clock

if TYPE_CHECKING:
    from paceline.engine.llm import LLM
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
    from paceline.engine.sizing.calibration import median_seconds  # imports torch

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
    from paceline.engine.sizing.calibration import median_seconds
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
    from paceline.engine.proposers import pick_method
    from paceline.engine.sizing.calibration import median_seconds
    from paceline.models.drafts.eagle import EagleRunner
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

    config, device = runner.model.config, runner.model.device
    states = {layer: runner.model.hidden_norm.new_zeros(rows, config.hidden_size) for layer in config.state_layers}
    spans, seconds = _spans(runner.num_blocks, rows), []
    for _ in range(4):
        before = clock.now()
        runner.forward(spans, states)
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)
        seconds.append(clock.now() - before)
    return median(seconds[1:])  # The first pass compiles
