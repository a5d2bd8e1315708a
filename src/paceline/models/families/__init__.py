"""What the configuration of each model family says."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.families.config import ModelConfig
    from paceline.models.families.prequantized import DTYPES, SCALES, FourBitScheme, four_bit_scheme, with_scales
    from paceline.models.families.rope import rope_from_hf

__all__ = ["DTYPES", "SCALES", "FourBitScheme", "ModelConfig", "four_bit_scheme", "rope_from_hf", "with_scales"]

__getattr__ = lazy_face(
    __name__,
    {
        "DTYPES": "prequantized",
        "FourBitScheme": "prequantized",
        "ModelConfig": "config",
        "SCALES": "prequantized",
        "four_bit_scheme": "prequantized",
        "rope_from_hf": "rope",
        "with_scales": "prequantized",
    },
)
