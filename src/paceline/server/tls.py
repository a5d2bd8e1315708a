"""The files of a TLS certificate and its key."""

import ssl
from dataclasses import dataclass

from paceline.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of a certificate chain and its private key, checked to fit together."""

    certificate: str
    key: str | None
    """Private key file; None if `certificate` contains the key."""

    @classmethod
    def from_paths(cls, certificate: str | None, key: str | None) -> "TlsFiles | None":
        """None without a certificate. Raises `InvalidConfig` if the files are unreadable or do not fit together."""
        if certificate is None:
            if key is not None:
                raise InvalidConfig("tls_key needs tls_cert: set the certificate file too")
            return None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_reject_password)
        except ssl.SSLError as error:
            raise InvalidConfig(
                f"tls_cert {certificate} and tls_key {key or certificate} are not a certificate and its key in PEM: "
                f"{error.reason or error}"
            ) from None
        except OSError as error:
            files = f"tls_cert {certificate}" + (f" or tls_key {key}" if key else "")
            raise InvalidConfig(f"cannot read {files}: {error.strerror}") from None
        return cls(certificate, key)


def _reject_password() -> str:
    raise InvalidConfig("tls_key is encrypted: use a key without a password")
