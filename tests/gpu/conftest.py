from importlib.util import find_spec

# A GPU machine may lack the packages of the extra `pool`.
collect_ignore = [] if find_spec("zmq") and find_spec("msgspec") else ["test_handoff.py", "test_in_place.py"]
