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
import venv
from pathlib import Path

OLDEST = re.search(r'"torch>=([\d.]+),', Path("pyproject.toml").read_text())[1]
NEWEST = "2.14.1"

TESTS = ("tests/models/nn", "tests/models/test_surgery.py", "tests/operations")


def make_environment(root: Path, version: str) -> Path:
    """The interpreter of the virtual environment ``root`` with this version of torch, made if it is not there.

    Raises:
        subprocess.CalledProcessError: pip failed, or another version is imported.
    """
    python = root / "bin" / "python"
    if not (root / "complete").exists():
        venv.create(root, clear=True, symlinks=True)
        paths = sysconfig.get_paths(vars={"base": str(root), "platbase": str(root)})
        # As a site folder, so that its own .pth files, CuTe DSL's among them, count.
        rest = f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
        # The constraints pin the one version that the other tests use.
        environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", f"torch=={version}"]
        subprocess.run(install, check=True, env=environment)
        Path(paths["purelib"], "rest.pth").write_text(rest)
        program = f"import torch; assert torch.__version__.split('+')[0] == {version!r}, torch.__version__"
        subprocess.run([python, "-c", program], check=True)
        (root / "complete").touch()
    return python


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
        command = [make_environment(options.environments / version, version), "-m", "pytest", *TESTS, *options.pytest]
        # The emulated device asks for a torch that sees no GPU.
        status[version] = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}).returncode
    for version, code in status.items():
        print(f"torch {version}: {'passed' if code == 0 else f'FAILED (pytest exits with {code})'}")
    return int(any(status.values()))


if __name__ == "__main__":
    sys.exit(main())
