"""Compiles the router, the simulator and the rules of a step with mypyc if PACELINE_COMPILE is set. All else is in pyproject.toml.

    make compiled
    PACELINE_COMPILE=1 pip install --no-build-isolation .

Both need mypy, setuptools and a C compiler. The modules stay what they are without it: Python, with the same results.
"""

import os

from setuptools import setup

PACKAGES = {
    "core": "clock kv_events",
    "policy": "step",
    "policy/cost": "curve speculation",
    "policy/routing": "kv_index kv_router prefix_tree rates router worker_costs",
    "planning/simulator": "batches cluster job prefix_cache rounds simulation worker",
    "planning/traces": "trace",
}
MODULES = [f"src/paceline/{package}/{name}.py" for package, names in PACKAGES.items() for name in names.split()]

if __name__ == "__main__":
    if os.environ.get("PACELINE_COMPILE"):
        from mypyc.build import mypycify

        setup(ext_modules=mypycify(["--follow-imports=silent", *MODULES], debug_level="0", target_dir="build/mypyc"))
    else:
        setup()
