"""A cluster's keys: one pair each for gateways, targets and drafts, and a list of further clients."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.pool_config import Role
from paceline.runtime.wire.keys import KeyPair, Security, generate, load, load_allowed, load_public, public_path, save

Party = Literal["gateway", "target", "draft"]
PARTIES: tuple[Party, ...] = ("gateway", "target", "draft")
CLIENTS: dict[Party, tuple[Party, ...]] = {
    "gateway": (),
    "target": ("gateway", "target"),
    "draft": ("target", "gateway"),
}
"""Who may connect to whom."""
PARTY_OF: dict[Role, Party] = {"target": "target", "prefill": "target", "draft": "draft"}
"""Whose key a worker has: prefill workers hold what targets hold, for targets."""
MORE = "allowed"
"""A folder of .pub files: clients beside these that workers let in, such as a second gateway with a key of its own."""


@dataclass(frozen=True, slots=True)
class KeyFolder:
    """Keys are read when they are asked for: a machine needs the secrets of what it runs, and everybody's public keys."""

    path: Path

    @staticmethod
    def make(path: Path) -> "KeyFolder":
        """New keys for all. Existing ones are never overwritten."""
        for party in PARTIES:
            save(generate(), path / party)
        (path / MORE).mkdir(exist_ok=True)
        return KeyFolder(path)

    def own(self, party: Party) -> KeyPair:
        return load(self.path / party)

    def public(self, party: Party) -> str:
        return load_public(public_path(self.path / party))

    def among(self, party: Party) -> Security:
        """For what workers of one role do among themselves: they share a key, and let in nobody else."""
        own = self.own(party)
        return Security(own, allowed=frozenset({own.public}))

    def listener(self, party: Party) -> Security:
        """For a worker's door."""
        allowed = {self.public(client) for client in CLIENTS[party]}
        more = self.path / MORE
        return Security(self.own(party), allowed=frozenset(allowed | (load_allowed(more) if more.is_dir() else set())))
