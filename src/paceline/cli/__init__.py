"""The command line: parses, calls, prints."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.cli.main import app

__all__ = ["app"]

__getattr__ = lazy_face(__name__, {"main": "app"})
