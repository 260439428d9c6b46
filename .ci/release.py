"""``make release``: builds what the package index gets, checks it, and leaves it in dist/.

* One source distribution, and from it a wheel for this machine; where Debian's cross compiler is installed
  (``apt install gcc-aarch64-linux-gnu``), on x86-64 also one for aarch64.
* Wheels by auditwheel, all by ``twine check --strict``.
* For every Python from 3.10 to 3.14 that is found, fresh virtual environments in which nothing can be compiled: without
  torch, with the package alone, with all extras. With ``--python 3.12`` one of them; ``--python none`` none.

Environment variables of pip count: an index of torch's CPU builds saves gigabytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CROSS = {"aarch64": "aarch64-linux-gnu-gcc"}
"""Machine -> the compiler for it elsewhere."""

KEPT_OUT = (".warnings", ".lock", ".pyc")

WITHOUT_TORCH = ("numpy", "ml-dtypes")
"""What the emulator needs for launches of PTX text."""

# Name of the environment; what pip installs, [..] being extras of the wheel; arguments of pip; program in checks/.
CHECKS = (
    ("without torch", WITHOUT_TORCH, ("--no-deps",), "without_torch.py"),
    ("package alone", (), (), "package_alone.py"),
    ("all extras", ("[all]",), (), "all_extras.py"),
)


def run(*command: str | Path, **options: object) -> str:
    """What a command prints.

    Raises:
        SystemExit: it fails; it says what it printed.
    """
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}\nexits with {done.returncode}")
    return done.stdout


def empty(dist: Path) -> None:
    """Deletes what an earlier release left, and nothing else that may be there."""
    for pattern in ("*.whl", "*.tar.gz", "SHA256SUMS"):
        for path in dist.glob(pattern):
            path.unlink()


def build(dist: Path, machines: list[str]) -> list[Path]:
    """The source distribution, and from it a wheel for every machine."""
    backend = (sys.executable, "-m", "build", "--no-isolation", "--outdir", dist)
    run(*backend, "--sdist", ROOT)
    (source,) = dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        (tree,) = Path(folder).iterdir()
        for machine in machines:
            cross = {}
            if machine != platform.machine():
                cross = {"CC": CROSS[machine], "CUTE_KERNELS_CORE_MACHINE": machine}
            run(*backend, "--wheel", tree, env=os.environ | cross)
    return [source, *sorted(dist.glob("*.whl"))]


def check_wheel(wheel: Path, machine: str) -> str:
    """The platform of a wheel whose name promises what its libraries need, and which has all of them.

    Raises:
        SystemExit: its name promises something else, or there is something in it that should not be.
    """
    name = wheel.stem.split("-")
    found = json.loads(run(sys.executable, "-m", "auditwheel", "show", "--json", wheel))["overall_tag"]
    if name[2:4] != ["py3", "none"] or found not in name[4].split("."):
        sys.exit(f"{wheel.name}: auditwheel finds {found}")
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    if kept := [file for file in files if file.endswith(KEPT_OUT) or not file.startswith("cute_kernels")]:
        sys.exit(f"{wheel.name} has {', '.join(kept)}")
    wanted = {"baseline", "avx2", "avx512"} if machine == "x86_64" else {"baseline"}
    cores = {Path(file).stem for file in files if file.endswith(".so")}
    if cores != wanted:
        sys.exit(f"{wheel.name} has the cores {sorted(cores)}, expected {sorted(wanted)}")
    return found


def interpreters(wanted: str | None) -> dict[str, Path]:
    """Version -> interpreter, of those that are found.

    Raises:
        SystemExit: the wanted one is not found.
    """
    found = {}
    for version in () if wanted == "none" else (wanted,) if wanted else PYTHONS:
        program = (
            "import subprocess, sys; print(sys.executable) "
            f"if sys.version_info[:2] == ({version.replace('.', ', ')}) else sys.exit(1)"
        )
        for name in (f"python{version}", *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))):
            where = shutil.which(name)
            done = subprocess.run([where, "-c", program], capture_output=True, text=True) if where else None
            if done is not None and done.returncode == 0:
                found[version] = Path(done.stdout.strip())
                break
    if wanted not in (None, "none") and not found:
        sys.exit(f"Python {wanted} is not found")
    return found


def check_installation(python: Path, wheel: Path, check: tuple[str, tuple[str, ...], tuple[str, ...], str]) -> str:
    """The last line that a program prints in a fresh environment, which has the wheel and no compiler."""
    name, packages, options, program = check
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder, "venv")
        run(python, "-m", "venv", venv)
        inside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        inside |= {"CC": "false", "XDG_CACHE_HOME": f"{folder}/cache"}
        extras = "".join(package for package in packages if package.startswith("["))
        others = [package for package in packages if not package.startswith("[")]
        pip = (venv / "bin" / "python", "-m", "pip", "install", "--quiet", *options)
        run(*pip, f"{wheel}{extras}", *others, env=inside, cwd=folder)
        done = run(pip[0], "-W", "ignore", ROOT / ".ci" / "checks" / program, env=inside, cwd=folder)
        return done.strip().rpartition("\n")[2]


def main() -> None:
    """Exits with 1 and what is wrong."""
    parser = argparse.ArgumentParser(prog="make release", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--python", metavar="VERSION", help="one of these alone, or none; default: all that are found")
    options = parser.parse_args()
    for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"):  # pip runs elsewhere
        if name in os.environ:
            os.environ[name] = os.path.abspath(os.environ[name])
    pythons = interpreters(options.python)
    empty(options.output)
    machines = [platform.machine(), *(m for m, cc in CROSS.items() if m != platform.machine() and shutil.which(cc))]
    files = build(options.output, machines)
    for machine in machines:
        (wheel,) = (file for file in files if file.suffix == ".whl" and file.stem.endswith(machine))
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, {check_wheel(wheel, machine)}", flush=True)
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    (own,) = (file for file in files if file.suffix == ".whl" and file.stem.endswith(platform.machine()))
    for version, python in pythons.items():
        for check in CHECKS:
            print(f"Python {version}, {check[0]}: {check_installation(python, own, check)}", flush=True)
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (options.output / "SHA256SUMS").write_text(sums)
    missing = [version for version in PYTHONS if version not in pythons]
    print(f"not checked: Python {', '.join(missing)}" if missing else "checked with every Python")
    print(f"to upload: python -m twine upload {options.output}/*.whl {options.output}/*.tar.gz")


if __name__ == "__main__":
    main()
