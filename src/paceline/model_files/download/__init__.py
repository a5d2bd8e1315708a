"""Models of a hub, brought to this machine."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.model_files.download.download import pull

__all__ = ["pull"]

__getattr__ = lazy_face(__name__, {"download": "pull"})
