"""Loading of weights from other workers, and serving of weights to them."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.transfer.weights.loader import WeightManager
    from paceline.transfer.weights.server import Activity

__all__ = ["Activity", "WeightManager"]

__getattr__ = lazy_face(__name__, {"loader": "WeightManager", "server": "Activity"})
