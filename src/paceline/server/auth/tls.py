"""TLS from certificate files."""

import ssl
from dataclasses import dataclass

from paceline.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Tls:
    certificate: str
    key: str | None
    """None: it is in the certificate's file."""

    @classmethod
    def of(cls, certificate: str | None, key: str | None) -> "Tls | None":
        """None without a certificate. Raises `InvalidConfig` for files that do not fit together, before anybody connects."""
        if certificate is None:
            if key is not None:
                raise InvalidConfig("tls_key needs a tls_cert: name the certificate's file too")
            return None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
        except ssl.SSLError as error:
            raise InvalidConfig(
                f"tls_cert {certificate} and tls_key {key or certificate} are no certificate and its key in PEM: "
                f"{error.reason or error}"
            ) from None
        except OSError as error:
            files = f"tls_cert {certificate}" + (f" or tls_key {key}" if key else "")
            raise InvalidConfig(f"{files} cannot be read: {error.strerror}") from None
        return cls(certificate, key)


def _no_password() -> str:
    raise InvalidConfig("tls_key is encrypted: a server that starts by itself needs one without a password")
