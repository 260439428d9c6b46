"""Compiles the core with the C compiler of the system: when the package is built, or a source tree is first used.

A library is kept in ``build/`` beside the sources, under a name that is made of everything that it was compiled from.
So a tree whose sources have changed, by an edit or another branch, compiles them again, and trees never share one.
It ends with its SHA-256, and is loaded where it is whole and nobody has written it who may not write the sources.
Needs nothing but the standard library: packages are built where nothing else is installed.
"""

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cute_kernels.common import files

from . import layout

FOLDER = Path(__file__).parent
BUILD = FOLDER / "build"
#: Instruction sets that the core is compiled for, by machine: flags of the compiler, and the flags of /proc/cpuinfo
#: that a processor has to have. The last one that it has all of is used.
_AVX2 = (
    ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt"),
    ("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "popcnt"),
)
_AVX512 = (
    ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512"),
    ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
)
VARIANTS: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "x86_64": {
        "baseline": ((), ()),
        "avx2": _AVX2,
        "avx512": (_AVX2[0] + _AVX512[0], _AVX2[1] + _AVX512[1]),
    },
}
_OTHER_MACHINES = {"baseline": ((), ())}
# A product and a sum are rounded apart unless the source asks for fmaf: the results must not depend on the variant.
_FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-Wall", "-Wextra",
)  # fmt: skip
#: Environment variable: more flags of the compiler, for development. Such a core has a library of its own.
FLAGS_VARIABLE = "CUTE_KERNELS_CORE_FLAGS"

#: Environment variable: the machine that $CC, a cross compiler, compiles for.
MACHINE_VARIABLE = "CUTE_KERNELS_CORE_MACHINE"

_DIGEST = hashlib.sha256().digest_size
_OLDEST_GLIBC = 17  # 2.17, the oldest that installers still take wheels for


class CoreNotBuilt(RuntimeError):
    """There is no compiled core, and none can be made."""


def machine() -> str:
    """Machine that is compiled for: this one, or the one that the environment names."""
    return os.environ.get(MACHINE_VARIABLE) or platform.machine()


def variants() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Variants of the core for the machine that is compiled for."""
    return VARIANTS.get(machine(), _OTHER_MACHINES)


def folder() -> Path:
    """Where the libraries of these sources are."""
    return BUILD / _name()


def _more_flags() -> tuple[str, ...]:
    """Flags of the environment; raises CoreNotBuilt where they are no words of a command line."""
    given = os.environ.get(FLAGS_VARIABLE, "")
    try:
        return tuple(shlex.split(given))
    except ValueError as error:
        raise CoreNotBuilt(f"{FLAGS_VARIABLE}={given!r} are no flags of a compiler: {error}") from error


def _name() -> str:
    """Name of the folder of these sources, compiled with these flags."""
    return _name_with(_more_flags(), machine())


@functools.cache
def _name_with(flags: tuple[str, ...], machine: str) -> str:
    digest = hashlib.sha256("\0".join(flags).encode())
    for path in sorted((*FOLDER.glob("*.[ch]"), *FOLDER.glob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    kind = f"{platform.system().lower()}-{machine}" + ("+flags" if flags else "")
    return f"{kind}-{digest.hexdigest()[:16]}"


def library(variant: str) -> Path:
    """The library of a variant, compiled if there is none that can be used. Raises CoreNotBuilt: it is missing, and
    there is no compiler, or that fails, or the folder cannot be written, or others can write it."""
    path = folder() / f"{variant}.so"
    try:
        return kept(path, compiler, functools.partial(_compile, variant))
    except TimeoutError:  # of a signal handler, which is no fault of the folder
        raise
    except OSError as error:
        raise CoreNotBuilt(
            f"the emulator's core is not compiled for these sources ({path}), and cannot be: {error}. "
            "Run pip install again as a user who may write there"
        ) from error


def kept(path: Path, command: Callable[[], list[str]], compile: Callable[[list[str], Path], None]) -> Path:
    """The library at a path, compiled if it is not there or cannot be used; processes that need the same one wait for
    each other. ``path``: in a folder of its own sources, which is in a folder for such folders. ``command``: finds the
    compiler. ``compile``: takes its command, and puts the library at a path (`put`). Raises CoreNotBuilt: of
    ``command`` or ``compile``; OSError: a folder cannot be written, or others can write it."""
    if _usable(path):
        return path
    found, libraries = command(), path.parent.parent
    libraries.mkdir(mode=0o755, exist_ok=True)
    with files.locked(libraries / ".lock"):
        if not _usable(path):
            path.parent.mkdir(mode=0o755, exist_ok=True)
            compile(found, path)
    return path


def _usable(path: Path) -> bool:
    """Whether a library is there, is whole, and is no other user's; raises PermissionError for folders that are."""
    for above in (path.parent.parent, path.parent):
        if os.path.lexists(above) and (problem := _problem(above, stat.S_ISDIR)):
            raise PermissionError(f"{above} is not used: {problem}")
    if not path.exists() or _problem(path, stat.S_ISREG):
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _problem(path: Path, kind: Callable[[int], bool]) -> str:
    """Why a file or folder may be of somebody who cannot write the sources; "" if it is not."""
    status, source = path.lstat(), Path(__file__).stat()
    if not kind(status.st_mode):
        return "it is a link, or no folder"
    return files.problem_of_owner(status, owners=(0, source.st_uid), mode=source.st_mode)


def platform_tag(libraries: Iterable[Path], usual: str) -> str:
    """Platform in the name of a wheel with these libraries, by PEP 600: what they need of the C library says which.
    ``libraries``: of one machine; ``usual``: the tag where they name no version of GNU's C library."""
    names = b"\0".join(path.read_bytes() for path in libraries)
    needed = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)(?=[.\0])", names)]
    return f"manylinux_2_{max(_OLDEST_GLIBC, *needed)}_{machine()}" if needed else usual


def compiler() -> list[str]:
    """$CC, or the first compiler that is found."""
    advice = "install one (Debian, Ubuntu: apt install gcc; Fedora: dnf install gcc), or install a wheel"
    return compiler_of("C", "CC", ("cc", "gcc", "clang"), "the emulator's core", advice)


def compiler_of(language: str, variable: str, usual: Iterable[str], what: str, advice: str) -> list[str]:
    """The compiler that a variable of the environment names, or the first of the usual ones. Raises CoreNotBuilt: there
    is none for ``what``; gives the advice."""
    given = os.environ.get(variable, "")
    try:
        named = shlex.split(given)
    except ValueError as error:
        raise CoreNotBuilt(f"{what} is not compiled; ${variable}, {given!r}, is no command: {error}") from error
    for command in [named] if named else [[name] for name in usual]:
        if shutil.which(command[0]):
            return command
    *others, last = usual
    nothing = f"none of {', '.join(others)} and {last} is there, and ${variable} is not set"
    missing = f"${variable}, {named[0]!r}, is not there" if named else nothing
    raise CoreNotBuilt(
        f"{what} is written in {language} and has to be compiled, which needs GCC or Clang ({missing}): {advice}"
    )


def _compile(variant: str, compiler: list[str], path: Path) -> None:
    flags, _ = variants()[variant]
    command = [*compiler, *_FLAGS, *flags, *_more_flags()]
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        check, result = Path(temporary, "layout.c"), Path(temporary, "core.so")
        check.write_text(layout.assertions())
        # Those that tables of operations become take longest. First, so that no processor waits for them at the end.
        sources = sorted(FOLDER.glob("*.c"), key=lambda source: (not source.name.startswith("operations_"), source))
        sources.append(check)
        objects = [Path(temporary, f"{source.stem}.o") for source in sources]
        commands = [[*command, "-c", f"-I{FOLDER}", str(s), "-o", str(o)] for s, o in zip(sources, objects)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            said = list(pool.map(run, commands, objects))  # the first error leaves out what has not begun
        said.append(run([*command, "-shared", *map(str, objects), "-o", str(result), "-lm"], result))
        warnings(path).write_text("".join(said))
        put(result, path)
    _remove_others(path.parent)


def put(result: Path, path: Path) -> None:
    """Puts what was compiled, and its digest, where it is kept."""
    content = result.read_bytes()
    result.write_bytes(content + hashlib.sha256(content).digest())  # loaders and linkers ignore what is behind ELF
    result.chmod(0o755)
    result.replace(path)  # at once: another process sees all of it or nothing


def warnings(path: Path) -> Path:
    """Where the compiler's warnings about a library are: none of them stops an installation."""
    return path.with_suffix(".warnings")


def run(command: list[str], result: Path, what: str = "the emulator's core") -> str:
    """Runs a command of the compiler, and returns what it says; raises CoreNotBuilt."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CoreNotBuilt(f"{what} does not compile: {command[0]} cannot be run: {error}") from error
    if done.returncode or not result.exists():
        raise CoreNotBuilt(
            f"{what} does not compile; {shlex.join(command)} says:\n{done.stdout}{done.stderr}"
            f"and returns {done.returncode}"
        )
    return done.stdout + done.stderr


def _remove_others(kept: Path) -> None:
    """Removes what this kind of machine compiled from other sources; who has loaded it is not disturbed."""
    machine = kept.name.rpartition("-")[0]
    for other in BUILD.glob(f"{machine}-*"):
        if other != kept:
            shutil.rmtree(other, ignore_errors=True)
