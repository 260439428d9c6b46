"""Compiled kernels on disk, shared by processes: a kernel is compiled once per machine and loaded in milliseconds.

An entry is one file. It holds machine code that will run in this process, so nothing of it is used before everything
about it is verified: its form, its checksum, that it was made for this very kernel by this very version of the kernel
sources, CuTe DSL, Python and platform, and that nobody but its owner, who must be this user, could have written it. An
entry that fails any of this is rebuilt, never loaded. The checksum detects corruption; against malice the file
permissions stand, and the directory's are verified for that.

The directory is ``CUTE_KERNELS_CACHE_DIR``, an absolute path, or the user's cache directory where that is not set, or a
folder for temporary files where the user has none; ``CUTE_KERNELS_CACHE_DIR=off`` keeps everything in memory. Of more
than ``CUTE_KERNELS_CACHE_MB`` megabytes, those that were not used for longest go when one is stored.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import stat
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path

from cute_kernels.common import files
from cute_kernels.dsl import host_code
from cute_kernels.dsl.allocations import Allocations

_KIND = b"CuteKrn"
MAGIC = _KIND + b"\x02"
"""Mark at the beginning of an entry, with the version of its format."""
SUFFIX = ".kernel"
LOCK_SECONDS = 120.0
"""How long a process waits for another one's compilation, which takes seconds, before it compiles for itself."""

DEFAULT_LIMIT = 1024
"""Megabytes: about 8,000 kernels."""

_LARGEST_ENTRY = 1 << 30
"""Bytes. Kernels have less than a megabyte; what is larger is not even read."""

_ABANDONED_SECONDS = 86_400.0
"""After which a temporary file is nobody's."""

_ENTRY_NAME = re.compile(r"[0-9a-f]{40}\.kernel")
_RUN_NAME = re.compile(r"[0-9a-f]{40}\.run")
_HELPER_NAME = re.compile(r"[0-9a-f]{40}(\.lock|\.run|[0-9a-z_]{8}\.tmp)")
"""Locks, runs of programs (`cute_kernels.explore`), and entries that were never finished: what `load_or_build` and
`tempfile` make of an entry's name."""

_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = hashlib.sha256().digest_size


class InvalidEntry(Exception):
    """Why an entry cannot be used."""


@dataclass(frozen=True)
class CompiledKernel:
    """Stored parts of a compiled kernel: its entry point, PTX and cubin; the relocatable object with host function and
    cubin, and the prefix of its symbols; what the kernel has in shared and tensor memory, for reports of the
    emulator."""

    kernel_name: str
    ptx: str
    cubin: bytes
    host_object: bytes
    host_prefix: str
    allocations: Allocations = Allocations("")


def directory() -> Path | None:
    """Where entries are kept, or None if the cache is off. The directory need not exist. Raises ValueError:
    ``CUTE_KERNELS_CACHE_DIR`` is set to something else than "off" or an absolute path."""
    chosen = os.environ.get("CUTE_KERNELS_CACHE_DIR")
    if chosen == "off":
        return None
    if chosen is None:
        return _default_directory()
    try:
        path = Path(chosen).expanduser()
    except RuntimeError:  # there is no home directory
        path = Path()
    # A relative path would be another directory in every working directory, and an empty one the directory itself.
    if not path.is_absolute():
        raise ValueError(
            f"CUTE_KERNELS_CACHE_DIR = {chosen!r}: must be an absolute path, one that begins with ~, or off"
        )
    return path


def _default_directory() -> Path | None:
    """The user's, or a folder of this user for temporary files: a container's user may have no home."""
    usual = _usual_directory()
    if usual.is_absolute() and _can_be_made(usual):
        return usual
    reason = f"{usual} cannot be made" if usual.is_absolute() else "this user has no home directory"
    try:
        folder = Path(tempfile.gettempdir(), f"cute-kernels-{os.geteuid()}")
    except FileNotFoundError:  # no folder for temporary files
        folder = None
    where = folder or "memory"
    _warn_once(f"{reason}: compiled kernels are kept in {where}; CUTE_KERNELS_CACHE_DIR names another folder")
    return folder


def _usual_directory() -> Path:
    """The folder of the XDG Base Directory Specification; with ~ unexpanded if there is no home directory."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(chosen if os.path.isabs(chosen) else "~/.cache", "cute-kernels")
    try:
        return folder.expanduser()
    except RuntimeError:
        return folder


def _can_be_made(path: Path) -> bool:
    """Whether a folder is there, or could be made."""
    try:
        if path.exists():
            return True
        above = next(above for above in path.parents if above.exists())
    except OSError:  # a folder on the way is closed to this user: HOME is another's, as in containers it often is
        return False
    return above.is_dir() and os.access(above, os.W_OK | os.X_OK)


def limit() -> int:
    """Bytes that entries may have together. Raises ValueError: ``CUTE_KERNELS_CACHE_MB`` is no whole number from 1
    on."""
    text = os.environ.get("CUTE_KERNELS_CACHE_MB", str(DEFAULT_LIMIT))
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"CUTE_KERNELS_CACHE_MB = {text!r}: must be a whole number of megabytes from 1 on")
    return int(text) * 1_000_000


def load_or_build(key: Hashable, build: Callable[[], CompiledKernel], unusable: str = "") -> CompiledKernel:
    """The entry of a kernel, built and stored if there is none that can be used.

    Concurrent processes build once: the others wait. Where the cache cannot be used (off, an unsafe or unwritable
    directory, a lock held too long) the kernel is built without it, with a warning unless it is off. ``key`` is what
    the generated code depends on, with a `repr` that says all of it; ``unusable``: why an entry turned out to be of no
    use: it is built anew, with a warning that says so.
    """
    root, most = directory(), limit()
    if root is None:
        return build()
    with contextlib.ExitStack() as held:
        try:
            make_private(root)
            path = entry_path(root, key)
            held.enter_context(files.locked(path.with_suffix(".lock"), LOCK_SECONDS))
            if unusable:
                raise InvalidEntry(unusable)
            if os.path.lexists(path):
                kernel = decode(read_private(path), key)
                with contextlib.suppress(OSError):  # a folder that can be read alone
                    os.utime(path)  # used now: `evict`
                return kernel
        except InvalidEntry as reason:
            _warn(f"cached kernel {path} is rebuilt: {reason}")
        except OSError as reason:
            _warn_once(f"kernels are not cached in {root}: {reason}")
            return build()
        kernel = build()
        try:
            write_whole(path, encode(key, kernel))
            evict(root, most, keep=path)
        except OSError as reason:
            _warn_once(f"kernels are not cached in {root}: {reason}")
        return kernel


def evict(root: Path, most: int, keep: Path) -> None:
    """Deletes the entries of a cache that were not used for longest until all have ``most`` bytes, and abandoned
    temporary files. What a process reads or builds is locked, and stays, as ``keep`` does."""
    for path in regular_files(root, _HELPER_NAME):
        with contextlib.suppress(OSError):
            if path.suffix == ".tmp" and time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink()
    found = []
    for path in regular_files(root, _ENTRY_NAME):
        with contextlib.suppress(OSError):  # another process was faster
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            return
        if path == keep:
            continue
        lock = path.with_suffix(".lock")
        with contextlib.suppress(OSError), files.locked(lock, 0):
            if not path.exists() or _begins_as_entry(path):
                path.unlink(missing_ok=True)
                total -= size
            lock.unlink()


def _warn(message: str) -> None:
    """Warns at the line that asks for a kernel."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)


_warn_once = functools.cache(_warn)


def entry_path(root: Path, key: Hashable) -> Path:
    return root / (hashlib.sha256(f"{fingerprint()}\n{key!r}".encode()).hexdigest()[:40] + SUFFIX)


@functools.cache
def fingerprint() -> str:
    """Digest of everything but the key that the stored code depends on."""
    return hashlib.sha256(json.dumps(_origin(), sort_keys=True).encode()).hexdigest()


def _origin() -> dict[str, object]:
    package = Path(__file__).parents[1]
    # Plans are constants of the generated code; dsl/ chooses its options, operations/compile.py its arguments and how
    # a launch passes them.
    modules = [module for folder in ("dsl", "kernels", "plan") for module in (package / folder).rglob("*.py")]
    sources = sorted([*modules, package / "operations" / "compile.py"])
    library = host_code.runtime_library()
    distributions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith("nvidia-cutlass-dsl"):
            distributions.setdefault(name, distribution.version)  # the first on the path is the one that is imported
    return {
        "sources": {str(p.relative_to(package)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sources},
        "dsl": distributions,
        "toolkit": "" if library is None else library.parents[1].name,  # which of two installed compilers was chosen
        "python": [sys.implementation.name, *sys.version_info[:3]],
        "platform": [sys.platform, platform.machine()],
    }


# --- file format: magic, length of header, header (JSON), sections, SHA-256 of everything before ----------------------

def encode(key: Hashable, kernel: CompiledKernel) -> bytes:
    values = {field.name: getattr(kernel, field.name) for field in fields(kernel)}
    texts = {name: v.text() if isinstance(v, Allocations) else v for name, v in values.items()}
    sections = {name: v.encode() if isinstance(v, str) else v for name, v in texts.items()}
    header = json.dumps(
        {
            "key": repr(key),
            "fingerprint": fingerprint(),
            "sections": [[name, len(content)] for name, content in sections.items()],
        }
    ).encode()
    body = b"".join([MAGIC, _LENGTH.pack(len(header)), header, *sections.values()])
    return body + hashlib.sha256(body).digest()


def decode(content: bytes, key: Hashable) -> CompiledKernel:
    """The kernel in the bytes of an entry. Raises InvalidEntry: not an entry, not intact, or not this kernel's."""
    sections = _sections(content, key)
    if set(sections) != {field.name for field in fields(CompiledKernel)}:
        raise InvalidEntry(f"it has sections {sorted(sections)}")
    texts = {name: sections[name].decode() for name in ("kernel_name", "ptx", "host_prefix")}
    try:
        held = Allocations.of_text(sections["allocations"].decode())
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidEntry(f"its allocations are not understood: {error!r}") from None
    return CompiledKernel(**(sections | texts | {"allocations": held}))


def _check_origin(header: dict, key: Hashable) -> None:
    if header["fingerprint"] != fingerprint():
        raise InvalidEntry("it was made by other sources, or another version of CuTe DSL, Python or platform")
    if header["key"] != repr(key):
        raise InvalidEntry(f"it is the kernel {header['key']}")


def _sections(content: bytes, key: Hashable) -> dict[str, bytes]:
    start = len(MAGIC) + _LENGTH.size
    if not content.startswith(MAGIC) or len(content) < start + _DIGEST_BYTES:
        raise InvalidEntry("it does not begin as an entry does")
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise InvalidEntry("its checksum is wrong")
    (length,) = _LENGTH.unpack_from(content, len(MAGIC))
    try:
        header = json.loads(body[start : start + length])
        _check_origin(header, key)
        offset, sections = start + length, {}
        for name, size in header["sections"]:
            sections[name] = body[offset : offset + size]
            offset += size
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidEntry(f"its header is not understood: {error!r}") from None
    if offset != len(body):
        raise InvalidEntry(f"its sections end at byte {offset} of {len(body)}")
    return sections


def read_private(path: Path) -> bytes:
    """The content of a regular file that only this user can write.

    A link is not followed, and a pipe not waited for.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidEntry(f"it cannot be opened: {error.strerror}") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidEntry("it is no regular file")
        if problem := files.problem_of_owner(status):
            raise InvalidEntry(problem)
        if status.st_size > _LARGEST_ENTRY:
            raise InvalidEntry(f"it has {status.st_size:,} bytes, more than the {_LARGEST_ENTRY:,} that any kernel has")
        return file.read()


def make_private(root: Path) -> None:
    """Creates the directory, or checks that nobody else can write it. Raises PermissionError: somebody else can."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if problem := _problem_of_folder(root):
        raise PermissionError(problem)


def _problem_of_folder(root: Path) -> str:
    """Who else can write a folder, or the link that leads to it."""
    return files.problem_of_owner(root.lstat()) or files.problem_of_owner(root.stat())


def write_whole(path: Path, content: bytes) -> None:
    """Under a name of its own first: a reader sees the whole entry or none."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def directory_problem(root: Path) -> str:
    """Why an existing directory is not used as the cache; empty if it is."""
    if problem := _problem_of_folder(root):
        return problem
    return "" if root.is_dir() and os.access(root, os.R_OK | os.W_OK | os.X_OK) else "it cannot be read and written"


def entries(root: Path) -> tuple[int, int]:
    """Number of a directory's entries, and their bytes."""
    found = regular_files(root, _ENTRY_NAME)
    return len(found), sum(path.lstat().st_size for path in found)


def clear(root: Path) -> int:
    """Deletes every entry, lock and abandoned temporary file of a directory; returns how many entries.

    Ours are regular files with our names. Of those, what does not begin as an entry was written by somebody else, or
    emptied by an accident, and stays, as other files do.
    """
    entries = [path for path in regular_files(root, _ENTRY_NAME) if _begins_as_entry(path)]
    for path in (*entries, *regular_files(root, _HELPER_NAME)):
        path.unlink(missing_ok=True)
    return len(entries)


def runs(root: Path) -> int:
    """How many runs of programs, and answers of `cute_kernels.explore.tune`, a directory has."""
    return len(regular_files(root, _RUN_NAME))


def regular_files(root: Path, name: re.Pattern[str]) -> list[Path]:
    """Regular files of a directory, links excluded, whose whole name matches; none if there is no directory."""
    if not root.is_dir():
        return []
    with os.scandir(root) as found:
        return sorted(Path(f.path) for f in found if name.fullmatch(f.name) and f.is_file(follow_symlinks=False))


def _begins_as_entry(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_KIND)) == _KIND  # of any version
