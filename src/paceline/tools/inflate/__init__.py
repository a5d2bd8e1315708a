"""Larger models made of a small one, for measuring."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.tools.inflate.calibration import Trial, calibrate, calibration_config
    from paceline.tools.inflate.inflate import hf_config, make, write_folder

__all__ = ["Trial", "calibrate", "calibration_config", "hf_config", "make", "write_folder"]

__getattr__ = lazy_face(
    __name__, {"calibration": "Trial calibrate calibration_config", "inflate": "hf_config make write_folder"}
)
