from importlib.util import find_spec

from tests.on_gpu import collect_ignore_glob, dense_weights

__all__ = ["collect_ignore_glob", "dense_weights"]

# A GPU machine may lack the packages of the extra `pool`.
if find_spec("zmq") is None or find_spec("msgspec") is None:
    collect_ignore_glob = ["test_*.py"]
