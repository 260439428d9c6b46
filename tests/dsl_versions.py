"""``make dsl-versions``: the tests that depend on CuTe DSL, with every version that `cute_kernels.dsl` names.

Each version gets a virtual environment in which only CuTe DSL is installed; everything else comes from the one that
this runs in. Kernels are tested bit for bit against their references with `KERNEL_VERSIONS`, the emulator's hold on
CuTe DSL with all of `EMULATOR_VERSIONS`. ``ARGS=--newest`` tries the newest version of the package index instead, where
it is none of them: a lane that may fail, and that says what a wider range would need.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from cute_kernels.dsl import compiling

EMULATOR_TESTS = (
    "tests/emulator/programs/test_host.py",
    "tests/emulator/programs/test_capturing.py",
    "tests/emulator/programs/test_call_arguments.py",
    "tests/emulator/machine/units/copies/test_im2col.py",
)
KERNEL_TESTS = (
    *EMULATOR_TESTS,
    "tests/operations/test_compile.py",
    "tests/kernels/sm100/test_cta_pair.py",
    "tests/dsl/test_dsl.py",
    "tests/dsl/test_kernel_cache.py",
    "tests/operations/runtime/test_launch.py",
    "tests/operations/test_emulator_backend.py",
    "tests/operations/test_gemm_tf32.py",
    "tests/kernels/sm100/test_patch_embed.py",
    "tests/kernels/sm90/test_patch_embed.py",
    "tests/kernels/sm100/test_gemm.py",
    "tests/kernels/sm90/test_gemm.py",
)


def make_environment(root: Path, install: Sequence[str], rest: str, check: str) -> Path:
    """The interpreter of the virtual environment ``root``, made if it is not there: with what pip gets to ``install``,
    and of the environment that this runs in what ``rest`` adds, the text of a .pth file.

    Raises:
        subprocess.CalledProcessError: pip failed, or the program ``check``.
    """
    python = root / "bin" / "python"
    if not (root / "complete").exists():
        venv.create(root, clear=True, symlinks=True)
        paths = sysconfig.get_paths(vars={"base": str(root), "platbase": str(root)})
        # The constraints pin the one version that the other tests use.
        environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *install]
        subprocess.run(pip, check=True, env=environment)
        Path(paths["purelib"], "rest.pth").write_text(rest + "\n")
        subprocess.run([python, "-c", check], check=True)
        (root / "complete").touch()
    return python


def environment_of(root: Path, version: str) -> Path:
    """The interpreter of an environment with this version of CuTe DSL."""
    parts = ("", "-libs-base", "-libs-core", "-libs-cu12")
    install = ["--no-deps", "--ignore-installed", *(f"{compiling.DISTRIBUTION}{part}=={version}" for part in parts)]
    check = f"import cutlass; assert cutlass.__version__ == {version!r}, cutlass.__version__"
    return make_environment(root, install, sysconfig.get_paths()["purelib"], check)


def newest() -> str:
    """The newest version that the package index has, of pre-releases too."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--pre", compiling.DISTRIBUTION]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.search(rf"^{compiling.DISTRIBUTION} \((.+)\)$", said, re.MULTILINE)[1]


def main() -> int:
    """Exit status 1 if a test fails with any version."""
    parser = argparse.ArgumentParser(prog="make dsl-versions", description=__doc__.partition("\n")[0])
    known = compiling.EMULATOR_VERSIONS
    parser.add_argument("--versions", nargs="+", choices=known, default=known)
    parser.add_argument("--newest", action="store_true", help="the newest of the package index instead")
    default = Path(sys.prefix) / "dsl"
    parser.add_argument("--environments", type=Path, default=default, metavar="DIR", help="default: %(default)s")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    options = parser.parse_args()
    if options.newest:
        options.versions = [version for version in (newest(),) if version not in known]
        print(f"newer than {known[-1]}: {', '.join(options.versions) or 'nothing'}", flush=True)
    status = {}
    for version in options.versions:
        tests = EMULATOR_TESTS if version in known[: -len(compiling.KERNEL_VERSIONS)] else KERNEL_TESTS
        print(f"--- {compiling.DISTRIBUTION} {version}: {len(tests)} files", flush=True)
        command = [environment_of(options.environments / version, version), "-m", "pytest", *tests, *options.pytest]
        status[version] = subprocess.run(command, env=os.environ | {compiling.UNTESTED: version}).returncode
    for version, code in status.items():
        print(f"{compiling.DISTRIBUTION} {version}: {'passed' if code == 0 else f'FAILED (pytest exits with {code})'}")
    return int(any(status.values()))


if __name__ == "__main__":
    sys.exit(main())
