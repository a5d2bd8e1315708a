"""The other targets of a cluster, as one that takes cached blocks from them knows them."""

from collections.abc import Mapping

from paceline.runtime.deploy.directory import Member

IDLE_SECONDS = 60.0
"""How long a line to a peer is kept that nobody needs: in a large cluster few pairs have much to give each other."""


class PeerBook:
    """Who there is, and who was needed of late. Owned by one thread."""

    def __init__(self) -> None:
        self._members: Mapping[str, Member] = {}
        self._needed: dict[str, float] = {}

    def meet(self, members: Mapping[str, Member]) -> None:
        """These and no others."""
        self._members = members

    def need(self, name: str, now: float) -> None:
        """There should be a line to it."""
        self._needed[name] = now

    def lines(self, now: float) -> dict[str, Member]:
        """To whom there should be one."""
        self._needed = {name: at for name, at in self._needed.items() if now - at < IDLE_SECONDS}
        return {name: self._members[name] for name in self._needed if name in self._members}
