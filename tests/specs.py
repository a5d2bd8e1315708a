"""Descriptions of models for tests, changed by the names of `flat_spec`."""

from typing import Any

from paceline.models.families.flat import flat_fields, flat_spec
from paceline.models.families.spec import DecoderSpec


def changed(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    """A model like `spec` with other values of arguments of `flat_spec`."""
    return flat_spec(**flat_fields(spec) | changes)
