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
        "deployment": "down is_up live_pools observe_cluster up",
        "draft_swap": "DraftSwap with_draft",
        "load": "load_config load_gateway_config",
        "serving": "ServerReady serve",
    },
)
