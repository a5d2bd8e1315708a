"""How an engine is built: models, proposers, compiled kernels."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.engine.start.build import (
        build_engine,
        draft_of,
        is_optional,
        load_second,
        load_weights,
        pick_device,
        pick_dtype,
        pick_quantization,
    )
    from paceline.engine.start.compile_child import compile_into
    from paceline.engine.start.llm import LLM, Prompt
    from paceline.engine.start.proposers import pick_method

__all__ = [
    "LLM",
    "Prompt",
    "build_engine",
    "compile_into",
    "draft_of",
    "is_optional",
    "load_second",
    "load_weights",
    "pick_device",
    "pick_dtype",
    "pick_method",
    "pick_quantization",
]

__getattr__ = lazy_face(
    __name__,
    {
        "build": "build_engine draft_of is_optional load_second load_weights pick_device pick_dtype pick_quantization",
        "compile_child": "compile_into",
        "llm": "LLM Prompt",
        "proposers": "pick_method",
    },
)
