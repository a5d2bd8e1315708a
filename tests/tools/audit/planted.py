"""Known bugs of speculative decoding, injected by patching.

`benchmarks/exactness/audit.py` injects them into the embedded model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.engine import host
from paceline.engine.engine import Engine
from paceline.engine.output import OutputProcessor
from paceline.engine.step.step import Schedule
from paceline.kernels.cpu.decoder import Sampler
from paceline.speculation.distribution import distribution
from paceline.speculation.proposers.model import draft_model, layer_skip
from paceline.speculation.rows.rows import RowContext
from paceline.speculation.verification import rejection
from paceline.speculation.verification import verification as verify

Bug = Callable[[Engine], Any]


@contextmanager
def patched(*places: tuple[object, str, Any]) -> Iterator[None]:
    """Replace attributes of modules and instances inside the block."""
    before = [(place, name, vars(place).get(name, patched)) for place, name, _ in places]
    for place, name, value in places:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            if value is patched:
                delattr(place, name)
            else:
                setattr(place, name, value)


def hot(rows: Sequence[RowContext]) -> list[RowContext]:
    """The rows at temperature 1."""
    return [replace(row, params=replace(row.params, temperature=1.0)) for row in rows]


def verification_ignores_the_temperature(engine: Engine) -> Any:
    """Rows after a draft are verified at temperature 1. The first row of a round is correct, unless the pass picks its tokens
    itself: it has one rule for all rows of a sequence."""

    def partly(rows: Sequence[RowContext]) -> list[RowContext]:
        return [hot([row])[0] if row.path else row for row in rows]

    samplers_of = host.samplers_of

    def of_pass(schedule: Schedule, output: OutputProcessor) -> list[Sampler] | None:
        correct = samplers_of(schedule, output)
        if correct is None:
            return None
        return [
            Sampler(replace(one.params, temperature=1.0), one.stream) if item.num_draft else one
            for item, one in zip(schedule.items, correct, strict=True)
        ]

    return patched(
        (host, "samplers_of", of_pass),
        (rejection, "log_distribution", lambda logits, rows: distribution.log_distribution(logits, partly(rows))),
        (verify, "pick", lambda logits, rows: distribution.pick(logits, partly(rows))),
    )


def draft_ignores_the_temperature(engine: Engine) -> Any:
    """The draft samples at temperature 1 and reports the q of the request's temperature."""

    def faulty(logits: Tensor, rows: Sequence[RowContext]) -> tuple[Tensor, Tensor]:
        return distribution.sample_draft(logits, hot(rows))[0], distribution.sample_draft(logits, rows)[1]

    return patched((draft_model, "sample_draft", faulty), (layer_skip, "sample_draft", faulty))


def q_rounded_after_sampling(engine: Engine) -> Any:
    """Drafts are sampled from a float32 q and verified with a bfloat16 q."""

    def rounded(logits: Tensor, rows: Sequence[RowContext]) -> tuple[Tensor, Tensor]:
        tokens, q = distribution.sample_draft(logits, rows)
        return tokens, q.bfloat16().float()

    return patched((draft_model, "sample_draft", rounded), (layer_skip, "sample_draft", rounded))


def stale_slot(engine: Engine, every: int = 1) -> Any:
    """In every `every`-th round with drafts, the keys and values of its first token are not written: later rows read the old
    content of the slot."""
    forward, count = engine.runner.forward, 0

    def faulty(spans: Sequence[Any], *rest: Any, **options: Any) -> Any:
        nonlocal count
        hit = []
        for span in spans:
            if span.num_logits > 1:
                count += 1
                if count % every == 0:
                    hit.append((span.blocks[span.context_len // BLOCK_SIZE], span.context_len % BLOCK_SIZE))
        kept = [[part[slot].clone() for layer in engine.runner.cache for part in layer] for slot in hit]
        output = forward(spans, *rest, **options)
        for slot, values in zip(hit, kept, strict=True):
            for part, value in zip((part for layer in engine.runner.cache for part in layer), values, strict=True):
                part[slot] = value
        return output

    return patched((engine.runner, "forward", faulty))


COUPLED: dict[str, Bug] = {
    "verification ignores the temperature": verification_ignores_the_temperature,
    "a stale KV slot": stale_slot,
}
REJECTION: dict[str, Bug] = {
    "verification ignores the temperature": verification_ignores_the_temperature,
    "the draft ignores the temperature": draft_ignores_the_temperature,
    "q rounded after sampling": q_rounded_after_sampling,
    "a stale KV slot": stale_slot,
}
