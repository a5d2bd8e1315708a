"""The division of a device's memory among its workers."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import InvalidConfig

SHARED_MEMORY = 0.85
"""Share of a device's memory that its workers divide among themselves, unless `limits.memory_fraction` is set."""


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """One worker's claim on the memory of its devices."""

    name: str
    devices: tuple[str, ...]
    weight: float
    """Weight relative to the other claims on a device."""
    given: float | None = None
    """Configured fraction. If None, the worker gets a share by weight."""


def device_shares(claims: Sequence[MemoryClaim]) -> dict[str, float]:
    """Memory fraction of each worker, by name. Configured fractions are kept; the rest of `SHARED_MEMORY` is divided by weight.
    A worker on several devices gets the smallest of its shares on all of them."""
    by_device: dict[str, list[MemoryClaim]] = {}
    for claim in claims:
        for device in claim.devices:
            by_device.setdefault(device, []).append(claim)
    shares: dict[str, float] = {}
    for device, sharing in by_device.items():
        given = sum(claim.given for claim in sharing if claim.given is not None)
        weight = sum(claim.weight for claim in sharing if claim.given is None)
        if given > 1.0 or (weight and given >= SHARED_MEMORY):
            names = ", ".join(claim.name for claim in sharing)
            raise InvalidConfig(
                f"the workers on {device} ({names}) need {given:.2f} of its memory: lower limits.memory_fraction, or assign "
                "them to other devices"
            )
        for claim in sharing:
            share = (SHARED_MEMORY - given) * claim.weight / weight if claim.given is None else claim.given
            shares[claim.name] = min(share, shares.get(claim.name, 1.0))
    return shares
