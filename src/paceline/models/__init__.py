"""Models: families, weights, the decoder, draft heads, runners and tensor parallelism."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.runners import make_runner, make_second_runner

__all__ = ["make_runner", "make_second_runner"]

__getattr__ = lazy_face(__name__, {"runners": "make_runner make_second_runner"})
