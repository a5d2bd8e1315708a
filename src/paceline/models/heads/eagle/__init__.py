"""The EAGLE head."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.heads.eagle.eagle import LANE_BLOCKS, MAX_BRANCH, EagleModel, EagleRunner
    from paceline.models.heads.eagle.eagle_forms import read_eagle
    from paceline.models.heads.eagle.eagle_gpu import (
        HeadOps,
        gpu_eagle_logits,
        gpu_eagle_pass,
        gpu_eagle_states,
        plan_eagle,
    )
    from paceline.models.heads.eagle.eagle_weights import EagleConfig

__all__ = [
    "LANE_BLOCKS",
    "MAX_BRANCH",
    "EagleConfig",
    "EagleModel",
    "EagleRunner",
    "HeadOps",
    "gpu_eagle_logits",
    "gpu_eagle_pass",
    "gpu_eagle_states",
    "plan_eagle",
    "read_eagle",
]

__getattr__ = lazy_face(
    __name__,
    {
        "eagle": "EagleModel EagleRunner LANE_BLOCKS MAX_BRANCH",
        "eagle_forms": "read_eagle",
        "eagle_gpu": "HeadOps gpu_eagle_logits gpu_eagle_pass gpu_eagle_states plan_eagle",
        "eagle_weights": "EagleConfig",
    },
)
