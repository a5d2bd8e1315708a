"""The format of logs, and traces."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.telemetry.log import configure_logging, log_as, text_line
    from paceline.telemetry.tracing import Tracing

__all__ = ["Tracing", "configure_logging", "log_as", "text_line"]

__getattr__ = lazy_face(__name__, {"log": "configure_logging log_as text_line", "tracing": "Tracing"})
