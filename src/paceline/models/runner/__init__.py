"""Runners: a model with the blocks of its paged cache."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.runner.runner import (
        Cache,
        ModelRunner,
        Span,
        around_16s,
        build_inputs,
        early_exit,
        first_layers,
        long_prompts,
        pass_rows,
        warm_up_sizes,
    )

__all__ = [
    "Cache",
    "ModelRunner",
    "Span",
    "around_16s",
    "build_inputs",
    "early_exit",
    "first_layers",
    "long_prompts",
    "pass_rows",
    "warm_up_sizes",
]

__getattr__ = lazy_face(
    __name__,
    {
        "runner": "Cache ModelRunner Span around_16s build_inputs early_exit first_layers long_prompts pass_rows warm_up_sizes"
    },
)
