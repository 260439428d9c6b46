"""The core's build: what is compiled anew and when, what is said where it cannot be, headers against the compiler."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from cute_kernels.common import interrupts
from cute_kernels.emulator.core import build, layout, library
from tests.emulator.core_variants import ALL_VARIANTS
from tests.nightly import NIGHTLY

SOURCES = {
    "state.h": """
        #include <stdint.h>
        enum { COUNT = 3, FIRST = 0, SECOND, LAST = COUNT };
        typedef struct Part { int16_t a, b; } Part;
        typedef struct Whole {
          Part parts[COUNT];  // a comment; with { braces }
          int32_t (*call)(struct Whole *whole, int64_t word);
          const uint8_t *bytes;
          int64_t words[];
        } Whole;
    """,
    "core.h": """
        #include "state.h"
        #define EXPORT __attribute__((visibility("default")))
        EXPORT int64_t answer(const Whole *whole, int32_t add);
    """,
    "answer.c": """
        #include "core.h"
        int64_t answer(const Whole *whole, int32_t add) { return whole->parts[SECOND].b + whole->words[0] + add; }
    """,
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree of a core of its own, `SOURCES`, which `imported` imports."""
    folder = tmp_path / "small_core"
    folder.mkdir()
    for name in ("__init__.py", "build.py", "layout.py", "library.py"):
        shutil.copy(build.FOLDER / name, folder)
    for name, text in SOURCES.items():
        folder.joinpath(name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    for variable in (library.VARIABLE, build.FLAGS_VARIABLE, build.MACHINE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    return folder


def imported(name: str) -> ModuleType:
    """A module of the tree as it is on disk now."""
    for known in [known for known in sys.modules if known.partition(".")[0] == "small_core"]:
        del sys.modules[known]
    importlib.invalidate_caches()
    return importlib.import_module(f"small_core.{name}")


def answer(add: int) -> int:
    """Of the tree's function, with 20 in ``parts[1].b`` and 300 in ``words[0]``."""
    loaded = imported("library").library()
    structures = sys.modules["small_core.layout"].STRUCTURES
    block = bytearray(ctypes.sizeof(structures["Whole"]) + 8)
    whole = structures["Whole"].from_buffer(block)
    whole.parts[1].b = 20
    ctypes.c_int64.from_buffer(block, structures["Whole"].words.offset).value = 300
    return loaded.answer(ctypes.addressof(whole), add)


def test_headers_are_read_as_the_compiler_reads_them(tree: Path):
    """Every size, offset and constant is an assertion in C, so this one tree compiles only if all are right."""
    assert answer(4000) == 4320
    small = sys.modules["small_core.layout"]
    assert small.CONSTANTS == {"COUNT": 3, "FIRST": 0, "SECOND": 1, "LAST": 3}
    assert small.STRUCTURES["Whole"].words.offset == 32
    assert small.FUNCTIONS == {"answer": (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32)}
    with pytest.raises(ValueError, match="Part has members"):
        small.words("Part")
    for text in ("sizeof(Whole) == 32", "offsetof(Whole, call) == 16", "offsetof(Part, b) == 2", "LAST == 3"):
        assert text in small.assertions()


@pytest.mark.parametrize("wrong", ["int32_t a; int16_t b;", "int16_t b, a;"])
def test_headers_that_are_read_otherwise_do_not_compile(tree: Path, wrong: str, monkeypatch: pytest.MonkeyPatch):
    small = imported("build")
    text = small.layout.assertions()
    state = tree / "state.h"
    state.write_text(state.read_text().replace("int16_t a, b;", wrong))
    monkeypatch.setattr(small.layout, "assertions", lambda: text)
    with pytest.raises(small.CoreNotBuilt, match="static assertion failed"):
        small.library("baseline")


def test_changed_sources_are_compiled_again_and_others_are_not(tree: Path):
    assert answer(0) == 320
    [first] = tree.glob("build/*/*.so")
    written = first.stat().st_mtime_ns
    assert answer(0) == 320 and first.stat().st_mtime_ns == written
    source = tree / "answer.c"
    source.write_text(source.read_text().replace("+ add", "- add"))
    assert answer(20) == 300
    [second] = tree.glob("build/*/*.so")
    assert second.parent != first.parent, "what the old sources made is gone"


def test_processes_that_need_a_library_compile_it_once(tree: Path):
    """The compiler, here one that counts, is called by the first of them, for each file once and to link them; the
    others wait for it."""
    compiler = tree.parent / "compiler"
    compiler.write_text(f"#!/bin/sh\necho called >> {tree.parent}/calls\nsleep 0.3\nexec cc \"$@\"\n")
    compiler.chmod(0o755)
    code = "from small_core.library import library; library()"
    environment = {"PATH": "/usr/bin:/bin", "CC": str(compiler), "PYTHONPATH": f"{tree.parent}:{':'.join(sys.path)}"}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (tree.parent / "calls").read_text() == 3 * "called\n"  # answer.c, the assertions, the library


@pytest.mark.parametrize(
    "compiler, said",
    [(None, r"none of cc, gcc and clang is there.*apt install gcc"), ("no-such-cc -x", r"\$CC, 'no-such-cc', is not")],
)
def test_without_a_compiler(tree: Path, compiler: str | None, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tree))
    monkeypatch.setenv("CC", compiler) if compiler else monkeypatch.delenv("CC", raising=False)
    small = imported("build")
    with pytest.raises(small.CoreNotBuilt, match=said):
        small.library("baseline")
    assert not list(tree.glob("build/*/*.so"))


@pytest.mark.parametrize(
    "text, said",
    [
        ("#!/bin/sh\necho a word\n", r"does not compile; \S*compiler -std.*says:\na word\nand returns 0"),
        ("#!/no/such/shell\n", r"does not compile: \S*compiler cannot be run: .*No such file"),
    ],
)
def test_a_compiler_that_makes_nothing(tree: Path, text: str, said: str, monkeypatch: pytest.MonkeyPatch):
    """It is named, and its fault is not taken for one of the folder."""
    compiler = tree.parent / "compiler"
    compiler.write_text(text)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    small = imported("build")
    with pytest.raises(small.CoreNotBuilt, match=f"(?s){said}"):
        small.library("baseline")
    assert not list(tree.glob("build/*/*.so"))


def test_a_compiler_that_is_no_command(tree: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", 'gcc "-O1')
    small = imported("build")
    with pytest.raises(small.CoreNotBuilt, match=r"\$CC, 'gcc \"-O1', is no command: No closing quotation"):
        small.library("baseline")


def test_built_library_needs_no_compiler(tree: Path, monkeypatch: pytest.MonkeyPatch):
    assert answer(1) == 321
    monkeypatch.setenv("PATH", str(tree))
    assert answer(1) == 321


ERROR, WARNING = "int64_t answer(void) { return 1 }", "static int unused(void) { return 1; }"


@pytest.mark.parametrize("text, flags", [(ERROR, ""), (WARNING, "-Werror")])
def test_errors_of_the_compiler_are_shown(tree: Path, text: str, flags: str, monkeypatch: pytest.MonkeyPatch):
    (tree / "more.c").write_text(f"{text}\n")
    small = imported("build")
    monkeypatch.setenv(small.FLAGS_VARIABLE, flags)
    with pytest.raises(small.CoreNotBuilt, match=r"does not compile; \S*cc .*\n.*more.c:1"):
        small.library("baseline")


def test_warnings_of_a_new_compiler_do_not_stop_an_installation(tree: Path):
    """They are kept beside the library."""
    (tree / "more.c").write_text(f"{WARNING}\n")
    assert answer(0) == 320
    small = imported("build")
    assert "unused" in small.warnings(small.library("baseline")).read_text()


def test_more_flags_make_a_library_of_its_own(tree: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither replaces the other, and flags that nobody can read are named."""
    source = tree / "answer.c"
    source.write_text("#ifndef MORE\n#define MORE 0\n#endif\n" + source.read_text().replace("add;", "add + MORE;"))
    assert answer(0) == 320
    small = imported("build")
    monkeypatch.setenv(small.FLAGS_VARIABLE, "-DMORE=5 -DOTHER='1 + 2'")
    assert answer(0) == 325
    assert len(list(tree.glob("build/*/*.so"))) == 2
    monkeypatch.setenv(small.FLAGS_VARIABLE, "-DMORE='5")
    with pytest.raises(small.CoreNotBuilt, match="CUTE_KERNELS_CORE_FLAGS=\"-DMORE='5\" are no flags"):
        small.library("baseline")


def test_another_machine_is_compiled_for(tree: Path, monkeypatch: pytest.MonkeyPatch):
    """By the compiler that $CC names; it has the baseline alone, beside the libraries of this machine."""
    small = imported("build")
    own = small.library("baseline")
    monkeypatch.setenv(small.MACHINE_VARIABLE, "riscv64")
    other = small.library("baseline")
    assert list(small.variants()) == ["baseline"] and own.exists()
    assert other.parent.name.startswith("linux-riscv64-") and other.parent != own.parent
    assert small.platform_tag([other], "x") in ("x", "manylinux_2_17_riscv64")


def test_folder_that_cannot_be_written(tree: Path):
    (tree / "build").write_text("a file where the folder would be")
    small = imported("build")
    with pytest.raises(small.CoreNotBuilt, match=r"is not compiled for these sources .*pip install again"):
        small.library("baseline")


def test_variants(monkeypatch: pytest.MonkeyPatch):
    """The last one whose instructions the processor has, unless another is named, which has to be one it has."""
    variants = {"baseline": ((), ()), "good": ((), ("a", "b")), "best": ((), ("a", "b", "c"))}
    monkeypatch.setattr(build, "variants", lambda: variants)
    monkeypatch.delenv(library.VARIABLE, raising=False)
    for extensions, expected in (("", "baseline"), ("b", "baseline"), ("bad", "good"), ("abcd", "best")):
        monkeypatch.setattr(library, "_processor", lambda extensions=extensions: frozenset(extensions))
        assert library.variant() == expected
    for named in ("baseline", "good", "best"):
        monkeypatch.setenv(library.VARIABLE, named)
        assert library.variant() == named
    monkeypatch.setattr(library, "_processor", lambda: frozenset("ab"))
    with pytest.raises(ValueError, match="CUTE_KERNELS_CORE='best'; this processor executes baseline, good"):
        library.variant()
    monkeypatch.setenv(library.VARIABLE, "bets")
    with pytest.raises(ValueError, match="CUTE_KERNELS_CORE='bets' is no variant of the core; there are baseline, goo"):
        library.variant()
    monkeypatch.setenv(library.VARIABLE, "")
    assert library.variant() == "good", "an empty value is none"


def test_processor_that_is_not_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without /proc, as in some containers, every machine still executes the baseline."""
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "_CPUINFO", tmp_path / "cpuinfo")
    library._processor.cache_clear()
    try:
        assert library.variant() == "baseline"
        (tmp_path / "cpuinfo").write_text("processor: 0\nflags\t: " + " ".join(build._AVX2[1]) + "\n")
        library._processor.cache_clear()
        assert library.usable() == ["baseline", "avx2"] or "avx2" not in build.variants()
    finally:
        library._processor.cache_clear()


@pytest.mark.parametrize("variant", ALL_VARIANTS)
def test_every_variant_compiles(variant: str):
    """Of the core itself, without warnings; those that this processor executes are loaded."""
    path = build.library(variant)
    assert build.warnings(path).read_text() == ""
    if library._processor().issuperset(build.variants()[variant][1]):
        loaded = ctypes.CDLL(str(path))
        assert all(hasattr(loaded, name) for name in layout.FUNCTIONS)


def test_the_wheel_is_named_after_the_c_library_that_it_needs(tmp_path: Path) -> None:
    """By the versions of symbols that binutils reads in the libraries; by day of the one that is in use."""
    libraries = [build.library(variant) for variant in (build.variants() if NIGHTLY else library.usable()[-1:])]
    needed = 17
    for path in libraries:
        text = subprocess.run(["readelf", "--version-info", "--wide", path], capture_output=True, text=True).stdout
        versions = [tuple(map(int, found.split("."))) for found in re.findall(r"Name: GLIBC_([0-9.]+)", text)]
        assert versions
        needed = max(needed, *(minor for _, minor, *_ in versions))
    assert needed == 17 or platform.machine() not in ("x86_64", "aarch64")  # the oldest that installers know
    assert build.platform_tag(libraries, "linux_any") == f"manylinux_2_{needed}_{platform.machine()}"
    none = tmp_path / "none.so"
    none.write_bytes(b"\x7fELF\0GLIBCXX_3.4.29\0GLIBC_PRIVATE\0")
    assert build.platform_tag([none], "linux_any") == "linux_any"
    none.write_bytes(b"\x7fELF\0GLIBC_2.2.5\0GLIBC_2.3\0")
    assert build.platform_tag([none], "linux_any") == f"manylinux_2_17_{platform.machine()}"


def library_of(tree: Path) -> Path:
    """The tree's library for every processor, which nobody has loaded."""
    return imported("build").library("baseline")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4000])


def a_byte_changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def without_content(path: Path) -> None:
    path.write_bytes(b"")


def writable_by_all(path: Path) -> None:
    path.chmod(0o777)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [cut, a_byte_changed, without_content, writable_by_all, a_link, a_pipe])
def test_a_library_that_cannot_be_trusted_is_compiled_again(tree: Path, spoil: Callable[[Path], None]) -> None:
    path = library_of(tree)
    content = path.read_bytes()
    spoil(path)
    small = imported("build")
    assert small.library("baseline") == path
    assert path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o777 == 0o755
    assert len(path.read_bytes()) == len(content)
    assert ctypes.CDLL(str(path)).answer is not None


def test_a_library_of_another_user_is_compiled_again(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the owner of the sources, or of root, is used."""
    path = library_of(tree)
    small = imported("build")
    made, told, owners = [], small.files.problem_of_owner, []

    def asked(status: os.stat_result, **trusted: object) -> str:
        owners.append(set(trusted["owners"]))
        values = list(status)
        values[stat.ST_UID] = 12345 if stat.S_ISREG(status.st_mode) and not made else status.st_uid
        return told(os.stat_result(values), **trusted)

    monkeypatch.setattr(small.files, "problem_of_owner", asked)
    monkeypatch.setattr(small, "_compile", lambda command, variant, path: made.append(path))
    assert small.library("baseline") == path and made == [path]
    assert owners[0] == {0, (tree / "build.py").stat().st_uid}


@pytest.mark.parametrize("folder", ["build", "build/*-*"])
@pytest.mark.parametrize("how", ["open", "link"])
def test_a_folder_that_others_can_write_is_not_used(tree: Path, folder: str, how: str) -> None:
    """Unless they can write the sources as well."""
    library_of(tree)
    [path] = tree.glob(folder)
    if how == "open":
        path.chmod(0o777)
    else:
        path.rename(tree / "elsewhere")
        path.symlink_to(tree / "elsewhere")
    small = imported("build")
    with pytest.raises(small.CoreNotBuilt, match=f"{path} is not used: (others may write it|it is a link)"):
        small.library("baseline")
    if how == "open":
        (tree / "build.py").chmod(0o666)
        assert answer(0) == 320


def test_the_lock_is_no_link(tree: Path) -> None:
    """What it leads to stays as it is, and the umask does not say who may write the folders."""
    precious = tree.parent / "precious"
    precious.write_text("precious")
    (tree / "build").mkdir()
    (tree / "build" / ".lock").symlink_to(precious)
    small = imported("build")
    with pytest.raises(small.CoreNotBuilt, match="symbolic links"):
        small.library("baseline")
    assert precious.read_text() == "precious"
    (tree / "build" / ".lock").unlink()
    (tree / "build").rmdir()
    before = os.umask(0)
    try:
        path = library_of(tree)
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o022 for each in (path, path.parent, path.parent.parent)] == [0, 0, 0]


def test_an_interrupt_ends_the_wait_for_another_process_that_compiles(tree: Path) -> None:
    small = imported("build")
    (tree / "build").mkdir()
    with small.files.locked(tree / "build" / ".lock"), pytest.raises(KeyboardInterrupt), interrupts.deferred():
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        small.library("baseline")


def test_a_time_limit_of_the_caller_is_no_fault_of_the_build(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = imported("build")

    def compile(*_: object) -> None:
        raise TimeoutError  # as a handler of SIGALRM does, where a test has a time limit

    monkeypatch.setattr(build, "_compile", compile)
    with pytest.raises(TimeoutError):
        build.library("avx2")
