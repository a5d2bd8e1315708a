"""Transfers of bytes between workers: KV blocks and weights. See docs/transfer.md."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.transfer.client import TransferClient
    from paceline.transfer.memory import DeviceMemory, device_memory
    from paceline.transfer.pool import channels_for
    from paceline.transfer.server import TransferServer
    from paceline.transfer.transfer import ChannelUnavailable, Part, Transfer, TransferCancelled, TransferFailed

__all__ = [
    "ChannelUnavailable",
    "DeviceMemory",
    "Part",
    "Transfer",
    "TransferCancelled",
    "TransferClient",
    "TransferFailed",
    "TransferServer",
    "channels_for",
    "device_memory",
]

__getattr__ = lazy_face(
    __name__,
    {
        "client": "TransferClient",
        "memory": "DeviceMemory device_memory",
        "pool": "channels_for",
        "server": "TransferServer",
        "transfer": "ChannelUnavailable Part Transfer TransferCancelled TransferFailed",
    },
)
