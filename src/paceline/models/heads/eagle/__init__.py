"""The EAGLE head."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.heads.eagle.eagle import LANE_BLOCKS, MAX_BRANCH, EagleModel, EagleRunner
    from paceline.models.heads.eagle.eagle_gpu import gpu_eagle_logits, gpu_eagle_pass, plan_eagle, product
    from paceline.models.heads.eagle.eagle_weights import EagleConfig

__all__ = [
    "LANE_BLOCKS",
    "MAX_BRANCH",
    "EagleConfig",
    "EagleModel",
    "EagleRunner",
    "gpu_eagle_logits",
    "gpu_eagle_pass",
    "plan_eagle",
    "product",
]

__getattr__ = lazy_face(
    __name__,
    {
        "EagleConfig": "eagle_weights",
        "EagleModel": "eagle",
        "EagleRunner": "eagle",
        "LANE_BLOCKS": "eagle",
        "MAX_BRANCH": "eagle",
        "gpu_eagle_logits": "eagle_gpu",
        "gpu_eagle_pass": "eagle_gpu",
        "plan_eagle": "eagle_gpu",
        "product": "eagle_gpu",
    },
)
