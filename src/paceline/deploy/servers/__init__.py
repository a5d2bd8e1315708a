"""The servers of this machine, as commands find them."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.deploy.servers.record import RunningServer, recorded, running_servers

__all__ = ["RunningServer", "recorded", "running_servers"]

__getattr__ = lazy_face(__name__, {"record": "RunningServer recorded running_servers"})
