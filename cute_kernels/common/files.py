"""Files that a command reads or writes: checked before any work is done, and errors that name them."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from cute_kernels.common import interrupts


def from_here(text: str) -> Path:
    """A path that a change of the current directory leaves alone, as argparse's ``type``: programs change it."""
    return Path(text).absolute()


def current_folder() -> Path | None:
    """The current folder; None where somebody has removed it, as a program may."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


class NotWritten(OSError):
    """A file of a command, or its output, could not be written; the message names it."""


lost: list[str] = []
"""Why output is missing: a command goes on, since it may find a fault, and says so in the end."""


def show(text: str) -> None:
    """Prints text; characters that the encoding of stdout does not have, as in the C locale, as escape sequences.
    Raises BrokenPipeError: nobody reads it."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with output():
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


@contextlib.contextmanager
def output() -> Iterator[None]:
    """Notes in `lost` that the block cannot write to stdout; raises BrokenPipeError where nobody reads it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        lost[:] = [f"stdout cannot be written: {error.strerror or error}"]


def complain(text: str) -> None:
    """Prints text on stderr; where that cannot be written either, nobody can be told."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


_UNSEEN = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters but tabs and ends of lines, and those that change the direction of text."""


def printable(text: str) -> str:
    """Foreign text without characters that command a terminal, or show it in another order: they are escaped."""
    return _UNSEEN.sub(lambda each: each[0].encode("unicode_escape").decode(), text)


def marked(text: str) -> str:
    """Bold on a terminal, elsewhere as it is."""
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() else text


def check_program(script: str | Path) -> None:
    """Whether there is a program to run. Raises OSError: IsADirectoryError for a folder, FileNotFoundError where there
    is no file."""
    if os.path.isdir(script):
        raise IsADirectoryError(f"script = {script}: must be the file of a program, and is a directory")
    if not os.path.isfile(script):
        raise FileNotFoundError(f"no file {script}")


def check_output(path: Path, *suffixes: str) -> None:
    """Whether a file can be written, as far as can be told without writing it. Raises ValueError: it has none of the
    suffixes, if any are given; OSError: FileNotFoundError without a folder to write into, IsADirectoryError for a
    folder, PermissionError."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{path} ends with {path.suffix or 'no suffix'}: must be one of {', '.join(suffixes)}")
    folder = path.resolve().parent  # of a link, what it leads to is written
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to write {path} into")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file to write")
    if path.exists():
        writable = os.access(path, os.W_OK)
    else:
        writable = os.access(folder, os.W_OK | os.X_OK)
    if not writable:
        raise PermissionError(f"{path} cannot be written: permission denied")


OUTPUTS = ("report", "sarif", "trace", "profile_json", "json", "csv", "output")
"""Options of commands that name a file to write."""


def check_apart(given: Mapping[str, object]) -> None:
    """Whether each file that a command writes is its own: none that it reads, and none that another option names.
    ``given``: values of all options and arguments, in which names of files may be words among others. Raises
    ValueError: naming the option."""
    written: dict[object, str] = {}
    for name in OUTPUTS:
        path = given.get(name)
        if isinstance(path, Path) and path != Path("-") and (path.is_file() or not path.exists()):
            other = written.setdefault(_identity(path), name)
            if other != name:
                raise ValueError(f"{_option(other)} and {_option(name)} are both {path}: must be two files")
    kept, trace = given.get("keep_ptx"), given.get("trace")
    for path in _named([value for name, value in given.items() if name not in OUTPUTS]):
        if (name := written.get(_identity(path))) is not None:
            raise ValueError(f"{_option(name)} = {given[name]}: the command reads this file: must be another one")
        folder = path.resolve().parent
        if isinstance(kept, Path) and folder == kept.resolve() and path.name.startswith("launch-"):
            raise ValueError(f"--keep-ptx = {kept}: the command reads {path.name}, which it would replace there")
        if isinstance(trace, Path) and folder == trace.resolve().parent and path.suffix == trace.suffix:
            if re.fullmatch(rf"{re.escape(trace.stem)}-\d+", path.stem):
                raise ValueError(f"--trace = {trace}: the command reads {path.name}, which it would replace")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _identity(path: Path) -> object:
    """Equal for all names of a file."""
    try:
        status = path.stat()
    except OSError:
        return path.resolve()
    return status.st_dev, status.st_ino


def _named(value: object) -> Iterator[Path]:
    """Files that are there and are named in a value, as ``FILE``, ``FILE:FUNCTION`` or ``FILE ARGS``."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _named(each)
    elif isinstance(value, (str, Path)):
        for word in dict.fromkeys(text for each in (str(value), *str(value).split()) for text in
                                  (each, each.partition(":")[0])):  # fmt: skip
            with contextlib.suppress(OSError, ValueError):
                if os.path.isfile(word):
                    yield Path(word)


def make_folder(path: Path) -> None:
    """Makes a folder to write into, and those above it, where they are missing. Raises OSError: naming the folder:
    NotADirectoryError where it or one above is a file, PermissionError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(above for above in (path, *path.parents) if above.exists())
        raise NotADirectoryError(f"{file} is a file, and {path} is to be a folder") from None
    except OSError as error:
        raise type(error)(f"{path} cannot be made: {error.strerror or error}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written into: permission denied")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names the file in errors of the block that writes it: a full device, for one, does not."""
    try:
        yield
    except OSError as error:
        raise NotWritten(f"{path} cannot be written: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Writes a text file in UTF-8, whole or not at all; what is no regular file, a device or a pipe, gets the text.

    So does a file that may be written and not replaced: its folder is read-only, or it is mounted by itself.

    Bytes of arguments that the locale cannot decode, which Python keeps as surrogates, are written as ``\\udc..``.

    Raises:
        OSError: naming the file.
    """
    data = text.encode("utf-8", "backslashreplace")
    with writing(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        target = path.resolve()
        try:
            _replace(target, data)
        except OSError as error:
            if error.errno not in _NOT_REPLACEABLE or not target.exists():
                raise
            target.write_bytes(data)


_NOT_REPLACEABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def _replace(target: Path, data: bytes) -> None:
    part = target.with_name(f".{secrets.token_hex(16)}.part")  # a name that nobody can have made a link of before
    try:
        with open(part, "xb") as file:
            file.write(data)
        if target.exists():
            part.chmod(target.stat().st_mode & 0o777)
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def problem_of_owner(status: os.stat_result, owners: Collection[int] = (), mode: int = 0) -> str:
    """Who else than this user can have written a file or a folder, as a sentence; "" if nobody can. ``owners``: more
    users who may; ``mode``: permissions that are no problem: of files that are trusted in any case."""
    if status.st_uid not in (os.geteuid(), *owners):
        return f"it belongs to user {status.st_uid}, not to user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) & ~mode and not stat.S_ISLNK(status.st_mode):
        return f"others may write it (mode {stat.S_IMODE(status.st_mode):o}; use chmod go-w)"
    return ""


@contextlib.contextmanager
def locked(path: Path, seconds: float | None = None) -> Iterator[None]:
    """Holds a lock that other processes and threads wait for, so many seconds or as long as it takes; the file stays,
    and is no link. Raises TimeoutError: it was held longer; OSError: the file cannot be made."""
    descriptor = _acquired(path, None if seconds is None else time.monotonic() + seconds)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
        os.close(descriptor)


def _acquired(path: Path, until: float | None) -> int:
    """The descriptor of a locked file, which is still there under this name."""
    while True:
        interrupts.check()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # who holds a lock may delete its file
                return descriptor
        except BlockingIOError:
            if until is not None and time.monotonic() >= until:
                os.close(descriptor)
                raise TimeoutError(f"another process holds {path}") from None
            time.sleep(0.05)
        except OSError:  # of a file system without locks
            os.close(descriptor)
            raise
        os.close(descriptor)
