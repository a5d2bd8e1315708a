"""Parts that listen to the steps of an engine."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.engine.hooks.handoff import (
        BlockPart,
        CacheLayout,
        HandoffPlan,
        KvExports,
        KvImports,
        NumberPart,
        PromptImport,
        StatePart,
        pack_numbers,
    )
    from paceline.engine.hooks.method_assignment import DefaultMethodTrial

__all__ = [
    "BlockPart",
    "CacheLayout",
    "DefaultMethodTrial",
    "HandoffPlan",
    "KvExports",
    "KvImports",
    "NumberPart",
    "PromptImport",
    "StatePart",
    "pack_numbers",
]

__getattr__ = lazy_face(
    __name__,
    {
        "handoff": "BlockPart CacheLayout HandoffPlan KvExports KvImports NumberPart PromptImport StatePart pack_numbers",
        "method_assignment": "DefaultMethodTrial",
    },
)
