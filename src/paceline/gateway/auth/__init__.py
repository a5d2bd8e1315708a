"""API keys, rate limits, middleware, strict mode and its audit log."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.auth.access import Access
    from paceline.gateway.auth.api_keys import SCOPES, ApiKey, KeyFile, KeyLimits, KeyShare, request_key
    from paceline.gateway.auth.rate_limit import Account, BodyCharge, ConnectionLimits, RateLimits, network_of

__all__ = [
    "SCOPES",
    "Access",
    "Account",
    "ApiKey",
    "BodyCharge",
    "ConnectionLimits",
    "KeyFile",
    "KeyLimits",
    "KeyShare",
    "RateLimits",
    "network_of",
    "request_key",
]

__getattr__ = lazy_face(
    __name__,
    {
        "access": "Access",
        "api_keys": "ApiKey KeyFile KeyLimits KeyShare SCOPES request_key",
        "rate_limit": "Account BodyCharge ConnectionLimits RateLimits network_of",
    },
)
