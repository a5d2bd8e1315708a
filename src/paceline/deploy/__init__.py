"""Starts and watches the processes of a server or a cluster."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.deploy.deployment import down, is_up, live_pools, observe_cluster, up
    from paceline.deploy.draft_swap import DraftSwap, with_draft
    from paceline.deploy.load import load_config, load_gateway_config
    from paceline.deploy.serving import ServerReady, serve

__all__ = [
    "DraftSwap",
    "ServerReady",
    "down",
    "is_up",
    "live_pools",
    "load_config",
    "load_gateway_config",
    "observe_cluster",
    "serve",
    "up",
    "with_draft",
]

__getattr__ = lazy_face(
    __name__,
    {
        "DraftSwap": "draft_swap",
        "ServerReady": "serving",
        "down": "deployment",
        "is_up": "deployment",
        "live_pools": "deployment",
        "load_config": "load",
        "load_gateway_config": "load",
        "observe_cluster": "deployment",
        "serve": "serving",
        "up": "deployment",
        "with_draft": "draft_swap",
    },
)
