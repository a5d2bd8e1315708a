"""The HTTP server and its protocol."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.http.server import TlsFiles, check_settings, make_models, make_server

__all__ = ["TlsFiles", "check_settings", "make_models", "make_server"]

__getattr__ = lazy_face(__name__, {"server": "TlsFiles check_settings make_models make_server"})
