"""Files that commands write: whole or not at all, through no link; locks; foreign text."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import unicodedata
from pathlib import Path

import pytest

from cute_kernels.common import files, interrupts


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY])
def test_a_file_that_may_be_written_and_not_replaced_is_written(
    reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is read-only, or of somebody else, or the file is mounted by itself."""
    path = tmp_path / "report.json"
    path.write_text("a longer text that was there")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(reason, os.strerror(reason))))
    files.check_output(path)
    files.write_text(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="other cannot be written"):
        files.write_text(tmp_path / "other", "new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    files.write_text(path, "first")
    path.chmod(0o640)
    with pytest.raises(OSError, match="report.json cannot be written"), monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        files.write_text(path, "second")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]
    link = tmp_path / "link"
    link.symlink_to(path)
    files.write_text(link, "third \N{GREEK SMALL LETTER MU}")
    assert link.is_symlink() and path.read_bytes() == b"third \xce\xbc"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_name_that_somebody_has_made_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of temporary files differ from one to the next; one that is there already is never written through."""
    written = []
    monkeypatch.setattr(Path, "replace", lambda part, _: written.append(part.name) or part.unlink())
    for _ in range(3):
        files.write_text(tmp_path / "report.json", "text")
    assert len(set(written)) == 3 and not any(str(os.getpid()) in name for name in written)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".guessed.part").symlink_to(precious)
    with pytest.raises(OSError, match="report.json cannot be written: File exists"):
        files.write_text(tmp_path / "report.json", "text")
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("replaced", [False, True])
def test_an_interrupt_ends_the_wait_for_a_lock(replaced: bool, tmp_path: Path) -> None:
    """Also inside of a call that holds signals back until its end."""
    raised = []
    with files.locked(tmp_path / "lock"):
        waiting = interrupts.deferred() if replaced else contextlib.nullcontext()
        alarm = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        alarm.start()
        with waiting:  # at its end the interrupt comes in any case
            try:
                with files.locked(tmp_path / "lock", 5):
                    pass
            except (KeyboardInterrupt, TimeoutError) as error:
                raised.append(type(error))
        alarm.join()
    assert raised == [KeyboardInterrupt]
    with files.locked(tmp_path / "lock", 0):
        pass


def test_a_lock_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), files.locked(tmp_path / "lock", 0):
        pass
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize(
    "owner, mode, problem",
    [
        (0, 0o100644, ""), (7, 0o100600, ""), (3, 0o100664, ""), (1, 0o100600, "it belongs to user 1, not to user 3"),
        (3, 0o100646, "others may write it (mode 646; use chmod go-w)"), (3, 0o120777, ""), (1, 0o120777, "it belongs"),
    ],
)  # fmt: skip
def test_who_can_have_written_a_file(owner: int, mode: int, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """User 3 asks; 0 and 7 may, and a group that writes what is trusted in any case. A link's mode says nothing."""
    monkeypatch.setattr(os, "geteuid", lambda: 3)
    status = os.stat_result((mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))
    found = files.problem_of_owner(status, owners=(0, 7), mode=0o664)
    assert found.startswith(problem) and bool(found) == bool(problem)


def test_foreign_text_commands_no_terminal() -> None:
    """The oracle is Unicode's own table: categories Cc (but tab and line feed), Cf of directions, Zl, Zp."""
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for code in range(0x11000):
        one = chr(code)
        hidden = unicodedata.category(one) in ("Cc", "Zl", "Zp") or unicodedata.bidirectional(one) in directions
        kept = files.printable(f"a{one}b") == f"a{one}b"
        assert kept == (not hidden or one in "\t\n"), hex(code)
    assert files.printable("\x1b]0;owned\x07\0") == r"\x1b]0;owned\x07\x00"
