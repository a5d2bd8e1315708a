"""The models of one server: a gateway for each, found by the name in a request."""

import asyncio
from collections.abc import Iterator, Sequence

from paceline.gateway.api.errors import BadRequest, NotFound
from paceline.gateway.sessions.gateway import Gateway


class ServedModels:
    """At least one gateway. All of them share the server's settings, keys, rate limits, flags and audit log; each has its own
    target workers, tokenizer and queue."""

    def __init__(self, gateways: Sequence[Gateway]) -> None:
        self._by_name = {gateway.model: gateway for gateway in gateways}
        self._aliases = {name: gateway for gateway in reversed(gateways) for name in gateway.config.model_names}
        self.first = gateways[0]

    def __iter__(self) -> Iterator[Gateway]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, name: str | None) -> Gateway:
        """The gateway of a model. The only model answers to any name with the setting `any_model_name`. Raises `NotFound`, or
        `BadRequest` if the name is missing and there are several models."""
        is_any = len(self) == 1 and self.first.config.any_model_name
        if name is None or is_any:
            if len(self) > 1:
                raise BadRequest(
                    f"you must provide a model parameter, one of {self._names}", param="model", code="missing_model"
                )
            return self.first
        gateway = self._by_name.get(name) or self._aliases.get(name)
        if gateway is None:
            advice = "" if len(self) > 1 else ", or set `any_model_name` on the server"
            raise NotFound(
                f"this server does not serve the model {name!r}: use {self._names}{advice}",
                param="model",
                code="model_not_found",
            )
        return gateway

    @property
    def failure(self) -> str | None:
        """Why requests of some model will not be served until an operator acts. None if all are served, or may be soon."""
        return next((failure for gateway in self if (failure := gateway.target.failure) is not None), None)

    @property
    def is_ready(self) -> bool:
        """Whether requests of some model start now."""
        return any(gateway.is_ready for gateway in self)

    @property
    def is_draining(self) -> bool:
        return self.first.is_draining

    @property
    def num_requests(self) -> int:
        """Requests that run or wait in the gateways' queues."""
        return sum(gateway.num_requests for gateway in self)

    async def drain(self) -> bool:
        """Rejects new requests and waits for running ones; returns whether all finished."""
        return all(await asyncio.gather(*(gateway.drain() for gateway in self)))

    def abort(self) -> None:
        """Ends every running request with an error."""
        for gateway in self:
            gateway.abort()

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self._by_name))
