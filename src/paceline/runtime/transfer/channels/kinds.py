"""The ways bytes may go, and which of them this worker has."""

from collections.abc import Sequence

from paceline.core.cluster_config import Transfer
from paceline.core.errors import InvalidConfig, MissingDependency
from paceline.runtime.transfer.channels import nixl_agent, windows
from paceline.runtime.wire.keys import Security

KINDS = ("memory", "nixl", "socket")
"""The best first. `socket` is the one that everybody has."""


def kinds_of(transfer: Transfer) -> Sequence[str] | None:
    """What a cluster's setting stands for, as `pick_kinds` wants it."""
    return {"auto": None, "nixl": KINDS, "socket": ("socket",)}[transfer]


def pick_kinds(wanted: Sequence[str] | None, security: Security | None) -> tuple[str, ...]:
    """Those `wanted`, best first, all of which must be here. None: all that are here, but NIXL only among workers without
    keys: its bytes are not encrypted, and whoever gave keys did not ask for that."""
    if wanted is None:
        has = {"memory": windows.is_available(), "nixl": security is None and nixl_agent.is_installed(), "socket": True}
        return tuple(kind for kind in KINDS if has[kind])
    for kind in wanted:
        if kind not in KINDS:
            raise InvalidConfig(f"there is no transfer by {kind!r}: choose from {', '.join(KINDS)}")
    if "memory" in wanted and not windows.is_available():
        raise InvalidConfig("transfer by shared memory needs Linux: leave `memory` out, sockets will do")
    if "nixl" in wanted and not nixl_agent.is_installed():
        raise MissingDependency("nixl", "transfer by NIXL", "transfer")
    return tuple(kind for kind in KINDS if kind in wanted)
