"""What every request body has in common: nothing unknown, nothing coerced, and `null` is the same as absent."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

Refusals = dict[str, tuple[tuple[Any, ...], str]]
"""Parameters of OpenAI's API that are not served: the values that change nothing, and what to do instead."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    refused: ClassVar[Refusals] = {}

    @model_validator(mode="before")
    @classmethod
    def _present(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        present = {name: value for name, value in values.items() if value is not None}
        for name, (harmless, instead) in cls.refused.items():
            if name not in present:
                continue
            value = present.pop(name)
            if not any(value == same and type(value) is type(same) for same in harmless):
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "{name} is not supported here: {instead}",
                    {"name": name, "instead": instead},
                )
        return present
