"""Files that commands write: whole or not at all, also where they cannot be replaced."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cute_kernels import files


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
