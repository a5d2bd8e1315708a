"""Target workers of other engines: vLLM or any OpenAI-compatible server behind the gateway's protocol."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.worker.upstream.build import make_upstream_worker

__all__ = ["make_upstream_worker"]

__getattr__ = lazy_face(__name__, {"build": "make_upstream_worker"})
