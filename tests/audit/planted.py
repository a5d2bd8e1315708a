"""Bugs that have bitten somebody, planted from outside. `benchmarks/audit.py` plants them in the embedded model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from paceline.engine.engine import Engine
from paceline.kernels.layout import BLOCK_SIZE
from paceline.speculation.proposers import draft_model, layer_skip
from paceline.speculation.verification import distribution, rejection
from paceline.speculation.verification.rows import RowContext
from paceline.speculation.verification.verify import verify as verification

Plant = Callable[[Engine], Any]


@contextmanager
def patched(*places: tuple[object, str, Any]) -> Iterator[None]:
    """Attributes of modules and instances, as long as the block lasts."""
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
    """At temperature 1, whatever was asked for."""
    return [replace(row, params=replace(row.params, temperature=1.0)) for row in rows]


def temperature_of_drafts_forgotten_by_verification(engine: Engine) -> Any:
    """Rows after a draft are judged at temperature 1; the first row of a round, as in plain decoding, is right."""

    def partly(rows: Sequence[RowContext]) -> list[RowContext]:
        return [hot([row])[0] if row.path else row for row in rows]

    return patched(
        (rejection, "log_distribution", lambda logits, rows: distribution.log_distribution(logits, partly(rows))),
        (verification, "pick", lambda logits, rows: distribution.pick(logits, partly(rows))),
    )


def temperature_forgotten_by_the_draft(engine: Engine) -> Any:
    """It draws at temperature 1 and says that it drew at the request's."""

    def forgetful(logits: Tensor, rows: Sequence[RowContext]) -> tuple[Tensor, Tensor]:
        return distribution.sample_draft(logits, hot(rows))[0], distribution.sample_draft(logits, rows)[1]

    return patched((draft_model, "sample_draft", forgetful), (layer_skip, "sample_draft", forgetful))


def q_rounded_after_sampling(engine: Engine) -> Any:
    """Drawn from 32 bits, judged by 16."""

    def rounded(logits: Tensor, rows: Sequence[RowContext]) -> tuple[Tensor, Tensor]:
        tokens, q = distribution.sample_draft(logits, rows)
        return tokens, q.bfloat16().float()

    return patched((draft_model, "sample_draft", rounded), (layer_skip, "sample_draft", rounded))


def stale_slot(engine: Engine, every: int = 1) -> Any:
    """In every so many-th round with drafts, the keys and values of its first token do not reach the cache: what was there
    before, of a rejected draft perhaps, is what later rows read."""
    forward, count = engine.runner.forward, 0

    def forgetful(spans: Sequence[Any], *rest: Any, **options: Any) -> Any:
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

    return patched((engine.runner, "forward", forgetful))


COUPLED: dict[str, Plant] = {
    "temperature on one side only": temperature_of_drafts_forgotten_by_verification,
    "a stale KV slot": stale_slot,
}
REJECTION: dict[str, Plant] = {
    "temperature on one side only: verification": temperature_of_drafts_forgotten_by_verification,
    "temperature on one side only: the draft": temperature_forgotten_by_the_draft,
    "q rounded after sampling": q_rounded_after_sampling,
    "a stale KV slot": stale_slot,
}
