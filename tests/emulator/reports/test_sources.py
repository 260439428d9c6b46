"""A PTX text may be anybody's and name any file: sources alone are read and shown, and nothing of it hides a fault."""

from __future__ import annotations

import json
import linecache
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator import Options, run
from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.reports import sarif, sources
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.emulator.reports.document import Outcome, document, dumps
from cute_kernels.emulator.reports.source_profile import profiles
from cute_kernels.emulator.reports.text import render

SECRET = "root:x:0:0:root:/root:/bin/bash"
#: A store outside of p, of line 1 of a file.
PTX = """.version 8.7
.target sm_90a
.address_size 64
.file 1 "{file}"
.visible .entry k(.param .u64 p) {{
  .reg .b64 %d1; ld.param.u64 %d1, [p];
  .loc 1 1 1
  st.global.u32 [%d1+{offset}], 1;
  ret;
}}
"""


def reported(file: str, ptx: str = PTX) -> str:
    """All that is written about a store whose PTX names a file: the report, its JSON and SARIF."""
    text = ptx.format(file=file, offset=4096)
    with pytest.raises(IllegalAccess) as caught:
        run(text, "k", grid=1, block=1, args=[np.zeros(4, np.uint32)])
    found = diagnose(caught.value)
    outcome = Outcome("emulate", ["cute-kernels"], "program", "sm_90a")
    written = [render(found), render(found, verbose=True), dumps(document(outcome, [found]))]
    log = json.dumps(sarif.log(outcome, [found]))
    assert found.kind == "out-of-bounds" and all("out-of-bounds" in each for each in (*written, log))
    return "\n".join((*written, log))


def profiled(file: str) -> str:
    """Counts of a kernel beside its source."""
    options = Options(counters=True)
    text = PTX.format(file=file, offset=0)
    units = run(text, "k", grid=1, block=1, args=[np.zeros(4, np.uint32)], options=options).units
    [found] = profiles([(text, "k", units)])
    return found.text() + json.dumps(found.document())


def secret(folder: Path) -> Path:
    path = folder / "secret"
    path.write_text(f"{SECRET}\n")
    return path


def link(folder: Path) -> Path:
    (folder / "kernel.cu").symlink_to(secret(folder))
    return folder / "kernel.cu"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "kernel.cu")
    return folder / "kernel.cu"


def pipe_with_a_writer(folder: Path) -> Path:
    path = pipe(folder)
    os.write(os.open(path, os.O_RDWR), f"{SECRET}\n".encode())
    return path


def link_to_device(folder: Path) -> Path:
    (folder / "kernel.cu").symlink_to("/dev/zero")
    return folder / "kernel.cu"


def too_large(folder: Path) -> Path:
    path = folder / "kernel.cu"
    path.write_text(f"{SECRET}\n")
    os.truncate(path, 1 << 40)
    return path


def a_folder(folder: Path) -> Path:
    (folder / "kernel.cu").mkdir()
    return folder / "kernel.cu"


def device(_: Path) -> Path:
    return Path("/dev/zero")


@pytest.mark.parametrize("make", [secret, link, pipe, pipe_with_a_writer, link_to_device, too_large, a_folder, device])
@pytest.mark.parametrize("write", [reported, profiled])
def test_only_sources_are_read(make: Callable[[Path], Path], write: Callable[[str], str], tmp_path: Path) -> None:
    path = make(tmp_path)
    text = write(str(path))
    assert path.name in text and SECRET not in text and "\0" not in text


@pytest.mark.parametrize("write", [reported, profiled])
def test_sources_are_shown_without_what_commands_a_terminal(write: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text("out\t= 1; // \x1b]0;owned\x07 \u202e\x9b2J\n")
    text = write(str(path))
    assert r"// \x1b]0;owned\x07 \u202e\x9b2J" in text.replace(r"\\", "\\")
    assert "\x1b" not in text and "\x07" not in text


@pytest.mark.parametrize("name", [r"a\000b.cu", r"\033[2J.cu", r"\012root.cu", r"\302\233.cu", "x" * 5000, ""])
def test_no_name_hides_a_fault(name: str) -> None:
    text = reported(name)
    assert "\0" not in text and "\x1b" not in text and "\x9b" not in text


@pytest.mark.parametrize("location", [".loc 1 0 0", ".loc 1 99999999999999 1", ".loc 9 1 1"])
def test_no_line_hides_a_fault(location: str, tmp_path: Path) -> None:
    reported(str(tmp_path / "kernel.cu"), PTX.replace(".loc 1 1 1", location))


@pytest.mark.parametrize("location", [f".loc 1 {'9' * 5000} 1", f".loc {'9' * 5000} 1 1", ".loc 1 -1 1"])
def test_lines_that_are_no_numbers_are_refused(location: str) -> None:
    with pytest.raises(UnsupportedPTX, match="needs the numbers of a file and a line"):
        reported("kernel.cu", PTX.replace(".loc 1 1 1", location))


@pytest.mark.parametrize("text", ["(" * 100_000, "x = [\n" * 9_000, "a.b" * 200_000, "-" * 200_000 + "1", "def f(:"])
def test_no_program_hides_a_fault(text: str, tmp_path: Path) -> None:
    """Python that its parser refuses, or is not deep enough for."""
    path = tmp_path / "kernel.py"
    path.write_text(text)
    assert "kernel.py" in reported(str(path))


def test_lines_are_of_the_file_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As compilers count them; of a name without a folder in the current one; of a notebook's cell, what it had."""
    path = tmp_path / "kernel.cu"
    path.write_bytes(b"one\r\nt\x0cw\xc2\x85o\nthree")
    assert [sources.text_of_line(str(path), n) for n in range(5)] == ["", "one", r"t\x0cw\x85o", "three", ""]
    monkeypatch.chdir(tmp_path)
    path.write_text("another\n")
    assert sources.text_of_line("kernel.cu", 1) == "another"
    (tmp_path / "link").symlink_to("kernel.cu")
    assert sources.text_of_line("link", 1) == "another"
    monkeypatch.setitem(linecache.cache, "<cell 1>", (7, None, ["of a cell\n"], "<cell 1>"))
    assert sources.text_of_line("<cell 1>", 1) == "of a cell"
