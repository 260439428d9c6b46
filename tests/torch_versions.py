"""``make torch-versions``: the tests of operations and layers with the oldest and the newest torch that are supported.

Each version gets a virtual environment in which torch and what it depends on is installed; everything else comes from
the one that this runs in, whose torch is the pinned one. ``ARGS="--versions 2.12.1"`` tries others.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests import dsl_versions

OLDEST = re.search(r'"torch>=([\d.]+),', Path("pyproject.toml").read_text())[1]
NEWEST = "2.14.1"

TESTS = ("tests/models/nn", "tests/models/test_surgery.py", "tests/operations")


def environment_of(root: Path, version: str) -> Path:
    """The interpreter of an environment with this version of torch."""
    # As a site folder, so that its own .pth files, CuTe DSL's among them, count.
    rest = f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})"
    check = f"import torch; assert torch.__version__.split('+')[0] == {version!r}, torch.__version__"
    return dsl_versions.make_environment(root, [f"torch=={version}"], rest, check)


def main() -> int:
    """Exit status 1 if a test fails with any version."""
    parser = argparse.ArgumentParser(prog="make torch-versions", description=__doc__.partition("\n")[0])
    parser.add_argument("--versions", nargs="+", default=[OLDEST, NEWEST])
    default = Path(sys.prefix) / "torch"
    parser.add_argument("--environments", type=Path, default=default, metavar="DIR", help="default: %(default)s")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    options = parser.parse_args()
    status = {}
    for version in options.versions:
        print(f"--- torch {version}", flush=True)
        command = [environment_of(options.environments / version, version), "-m", "pytest", *TESTS, *options.pytest]
        # The emulated device asks for a torch that sees no GPU.
        status[version] = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}).returncode
    for version, code in status.items():
        print(f"torch {version}: {'passed' if code == 0 else f'FAILED (pytest exits with {code})'}")
    return int(any(status.values()))


if __name__ == "__main__":
    sys.exit(main())
