from tests.on_gpu import collect_ignore_glob

__all__ = ["collect_ignore_glob"]
