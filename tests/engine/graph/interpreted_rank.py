"""A rank whose GPU kernels are interpreted: `paceline.models.parallel.process` with the weights of a GPU."""

import sys

from paceline.kernels.cpu import native
from paceline.models.parallel.process import main
from tests.kernels.gpu import interpreter

if __name__ == "__main__":
    interpreter.repair()
    native.library = lambda: None  # a CPU packs weights for its own kernels
    sys.exit(main(*map(int, sys.argv[1:])))
