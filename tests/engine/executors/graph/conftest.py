from tests.on_gpu import collect_ignore_glob, dense_weights

__all__ = ["collect_ignore_glob", "dense_weights"]
