"""``python -m cute_kernels``: the same as ``cute-kernels``."""

import sys

from cute_kernels.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
