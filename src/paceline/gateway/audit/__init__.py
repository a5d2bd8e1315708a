"""The audit log, and strict mode, in which every answer is written to it."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.audit.audit_log import AuditLog, AuditLogBroken, verify
    from paceline.gateway.audit.strict import AuditEntry, StrictMode

__all__ = ["AuditEntry", "AuditLog", "AuditLogBroken", "StrictMode", "verify"]

__getattr__ = lazy_face(__name__, {"audit_log": "AuditLog AuditLogBroken verify", "strict": "AuditEntry StrictMode"})
