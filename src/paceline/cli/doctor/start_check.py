"""The check of a cluster before a command starts workers, in a process of its own.

The process, `python -m paceline.cli.doctor.start_check`, reads the cluster from standard input and writes its problems. A
check in the command's process would leave torch, and on a GPU a CUDA context, in a gateway that runs for weeks.
"""

import subprocess
import sys

from paceline.cli.render import console
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig, PacelineError

UNSOUND = 2
"""Exit status of the process if the cluster has a problem."""


def check_before_start(config: ClusterConfig) -> None:
    """Raise `InvalidConfig` with every problem that `paceline doctor CLUSTER.yaml` finds."""
    import msgspec  # part of the extra `pool`

    with console.err.status(f"checking {config.name}"):
        result = subprocess.run(
            [sys.executable, "-m", __name__], input=msgspec.json.encode(config), stdout=subprocess.PIPE, check=False
        )
    if result.returncode == UNSOUND:
        raise InvalidConfig(result.stdout.decode())
    if result.returncode:
        raise PacelineError(f"the check of the cluster ended with status {result.returncode}: run `paceline doctor`")


def main() -> int:
    import msgspec

    from paceline.cli.doctor.cluster_checks import require_sound

    try:
        require_sound(msgspec.json.decode(sys.stdin.buffer.read(), type=ClusterConfig))
    except InvalidConfig as error:
        print(error, end="")
        return UNSOUND
    return 0


if __name__ == "__main__":
    sys.exit(main())
