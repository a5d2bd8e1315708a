"""How much of a device's memory each of the workers on it may take. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import InvalidConfig

MEMORY = 0.85
"""Share of a device that its workers take together when nobody says."""


@dataclass(frozen=True, slots=True)
class Sharer:
    """A worker and what it lies on."""

    name: str
    devices: tuple[str, ...]
    weight: float
    """Of what is to be divided, relative to the others."""
    given: float | None = None
    """A fraction that was asked for."""


def device_shares(sharers: Sequence[Sharer]) -> dict[str, float]:
    """Memory fractions by name: as given, and the rest of `MEMORY` by weight among those that do not say. A worker on several
    devices takes of each what the fullest one leaves it."""
    by_device: dict[str, list[Sharer]] = {}
    for sharer in sharers:
        for device in sharer.devices:
            by_device.setdefault(device, []).append(sharer)
    shares: dict[str, float] = {}
    for device, together in by_device.items():
        taken = sum(sharer.given for sharer in together if sharer.given is not None)
        weight = sum(sharer.weight for sharer in together if sharer.given is None)
        if taken > 1.0 or (weight and taken >= MEMORY):
            names = ", ".join(sharer.name for sharer in together)
            raise InvalidConfig(
                f"the workers on {device} ({names}) want {taken:.2f} of its memory together: lower limits.memory_fraction, or "
                "give them other devices"
            )
        for sharer in together:
            share = (MEMORY - taken) * sharer.weight / weight if sharer.given is None else sharer.given
            shares[sharer.name] = min(share, shares.get(sharer.name, 1.0))
    return shares
