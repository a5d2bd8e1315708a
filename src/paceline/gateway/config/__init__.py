"""Configuration of the server: file, environment, command line and run-time flags."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.config.config import SETTINGS, GatewayConfig, LearningConfig, SamplingDefaults, ServerConfig
    from paceline.gateway.config.flags import FlagStore
    from paceline.gateway.config.settings import PREFIX, Setting, read_file, read_yaml, suggest

__all__ = [
    "PREFIX",
    "SETTINGS",
    "FlagStore",
    "GatewayConfig",
    "LearningConfig",
    "SamplingDefaults",
    "ServerConfig",
    "Setting",
    "read_file",
    "read_yaml",
    "suggest",
]

__getattr__ = lazy_face(
    __name__,
    {
        "config": "GatewayConfig LearningConfig SETTINGS SamplingDefaults ServerConfig",
        "flags": "FlagStore",
        "settings": "PREFIX Setting read_file read_yaml suggest",
    },
)
