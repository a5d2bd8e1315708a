"""Checks that speculation does not change the text: prompts run with and without it, and every round is verified again."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.tools.audit.auditor import Auditor, Workload
    from paceline.tools.audit.html_report import page
    from paceline.tools.audit.report import Report
    from paceline.tools.audit.tests import require_scipy

__all__ = ["Auditor", "Report", "Workload", "page", "require_scipy"]

__getattr__ = lazy_face(
    __name__, {"auditor": "Auditor Workload", "html_report": "page", "report": "Report", "tests": "require_scipy"}
)
