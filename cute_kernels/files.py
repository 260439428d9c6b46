"""Files that a command reads or writes: checked before any work is done, and errors that name them."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def from_here(text: str) -> Path:
    """A path that a change of the current directory leaves alone, as argparse's ``type``: programs change it."""
    return Path(text).absolute()


def current_folder() -> Path | None:
    """The current folder; None where somebody has removed it, as a program may."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def show(text: str) -> None:
    """Prints text; characters that the encoding of stdout does not have, as in the C locale, as escape sequences."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def marked(text: str) -> str:
    """Bold on a terminal, elsewhere as it is."""
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() else text


def check_program(script: str | Path) -> None:
    """Whether there is a program to run.

    Raises:
        OSError: IsADirectoryError for a folder, FileNotFoundError where there is no file.
    """
    if os.path.isdir(script):
        raise IsADirectoryError(f"{script} is a directory; the file of a program is needed")
    if not os.path.isfile(script):
        raise FileNotFoundError(f"no file {script}")


def check_output(path: Path, *suffixes: str) -> None:
    """Whether a file can be written, as far as can be told without writing it.

    Args:
        path: of the file.
        suffixes: what is written, as ``.png``; any if none is given.

    Raises:
        ValueError: another suffix.
        OSError: FileNotFoundError without a folder to write into, IsADirectoryError for a folder, PermissionError.
    """
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{path} ends with {path.suffix or 'no suffix'}, allowed: {', '.join(suffixes)}")
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


def make_folder(path: Path) -> None:
    """Makes a folder to write into, and those above it, where they are missing.

    Raises:
        OSError: naming the folder: NotADirectoryError where it or one above is a file, PermissionError.
    """
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
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


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
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        if target.exists():
            part.chmod(target.stat().st_mode & 0o777)
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
