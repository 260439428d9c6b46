"""Where the disk cache is, when nobody says where, and what it keeps of many kernels."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from cute_kernels.commands.cli import main
from cute_kernels.common import files
from cute_kernels.dsl import kernel_cache as cache
from tests.processes import run_python

KERNEL = cache.CompiledKernel("kernel_0", ".entry kernel_0()", b"\x7fELF cubin", b"\x7fELF host\x00", "kernel_0_host")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def warned_of_nothing():
    cache._warn_once.cache_clear()
    yield
    cache._warn_once.cache_clear()


def sized(name: str, nbytes: int) -> cache.CompiledKernel:
    return dataclasses.replace(KERNEL, kernel_name=name, cubin=bytes(nbytes))


def store(name: str, nbytes: int, used: float) -> Path:
    """An entry that was last used at a time."""
    cache.load_or_build(name, lambda: sized(name, nbytes))
    path = cache.entry_path(cache.directory(), name)
    os.utime(path, (used, used))
    return path


# --- how much is kept -------------------------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_goes(root, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_MB", "1")
    a, b, c = (store(name, 300_000, used) for name, used in (("a", 1000.0), ("b", 2000.0), ("c", 3000.0)))
    assert cache.load_or_build("a", lambda: pytest.fail("built")).kernel_name == "a", "now the last one used"
    cache.load_or_build("d", lambda: sized("d", 300_000))
    assert [path.exists() for path in (a, b, c)] == [True, False, True]
    assert not b.with_suffix(".lock").exists()
    cache.load_or_build("e", lambda: sized("e", 600_000))
    left = {path.name for path in root.glob("*.kernel")}
    assert len(left) == 2 and cache.entry_path(root, "e").name in left and cache.entry_path(root, "d").name in left


def test_one_that_is_larger_than_the_limit_is_kept_alone(root, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_MB", "1")
    small = store("small", 1000, 1000.0)
    assert cache.load_or_build("large", lambda: sized("large", 2_000_000)).kernel_name == "large"
    assert not small.exists() and cache.entry_path(root, "large").exists()
    assert cache.load_or_build("large", lambda: pytest.fail("built")).kernel_name == "large"


def test_what_a_process_holds_stays(root, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_MB", "1")
    held, other = store("held", 600_000, 1000.0), store("other", 300_000, 2000.0)
    with open(held.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache.load_or_build("new", lambda: sized("new", 300_000))
        assert held.exists() and not other.exists()
    cache.load_or_build("newer", lambda: sized("newer", 300_000))
    assert not held.exists()


def test_only_the_caches_own_files_go(root, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_MB", "1")
    store("a", 1000, 1000.0)
    foreign = root / f"{'0' * 40}.kernel"
    foreign.write_bytes(bytes(3_000_000))
    young, old = root / f"{'1' * 40}abcdefgh.tmp", root / f"{'2' * 40}abcdefgh.tmp"
    young.touch()
    old.touch()
    os.utime(old, (1000.0, 1000.0))
    cache.load_or_build("b", lambda: sized("b", 1000))
    assert foreign.exists() and young.exists() and not old.exists()


def test_processes_that_evict_what_others_use(root, monkeypatch):
    """Four processes load and build thirty kernels that have no room together: every one gets the right kernel."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_MB", "1")
    program = """
import random, sys
from cute_kernels.common import files
from cute_kernels.dsl import kernel_cache as cache
draw = random.Random(int(sys.argv[1]))
for _ in range(150):
    name = str(draw.randrange(30))
    kernel = cache.load_or_build(name, lambda: cache.CompiledKernel(name, "p", name.encode() * 50_000, b"o", "h"))
    assert kernel.kernel_name == name and kernel.cubin == name.encode() * 50_000
print("right")
"""
    command = [sys.executable, "-W", "error", "-c", program]
    runs = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for i in range(4)]  # fmt: skip
    assert [run.communicate(timeout=300) for run in runs] == [("right\n", "")] * 4
    assert sum(path.stat().st_size for path in root.glob("*.kernel")) < 1_500_000


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "1G", "²"])
def test_a_limit_that_is_none_is_refused(root, monkeypatch, capsys, value):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_MB", value)
    with pytest.raises(ValueError, match=f"CUTE_KERNELS_CACHE_MB = '{value}': must be a whole number"):
        cache.load_or_build("a", lambda: pytest.fail("built"))
    assert main(["cache"]) == 2
    assert "CUTE_KERNELS_CACHE_MB = " in capsys.readouterr().err
    assert main(["doctor"]) == 1
    assert "unset CUTE_KERNELS_CACHE_MB, or set it to what is allowed" in capsys.readouterr().out


def test_the_command_says_the_limit(root, monkeypatch, capsys):
    store("a", 1000, 1000.0)
    assert main(["cache"]) == 0
    assert "of at most 1,024,000,000" in capsys.readouterr().out
    monkeypatch.setenv("CUTE_KERNELS_CACHE_MB", "7")
    assert main(["cache"]) == 0
    assert "of at most 7,000,000" in capsys.readouterr().out


def test_an_entry_that_no_memory_holds(root):
    path = store("a", 1000, time.time())
    with open(path, "r+b") as file:
        file.truncate(40 * 10**9)  # of holes
    with pytest.warns(RuntimeWarning, match="is rebuilt: it has 40,000,000,000 bytes"):
        assert cache.load_or_build("a", lambda: KERNEL) == KERNEL
    assert path.stat().st_size < 10_000


def test_a_lock_that_is_held(tmp_path):
    with files.locked(tmp_path / "a.lock", 0):
        with pytest.raises(TimeoutError, match="another process holds"), files.locked(tmp_path / "a.lock", 0.1):
            pass


def test_a_lock_that_is_deleted_before_it_is_had(tmp_path, monkeypatch):
    """Its name is what others wait for: the next file of that name is locked."""
    path, flock = tmp_path / "a.lock", fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(files.fcntl, "flock", flock)
        path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(files.fcntl, "flock", late)
    with files.locked(path, 0):
        with pytest.raises(TimeoutError), files.locked(path, 0):
            pass


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path):
    path = tmp_path / "a.lock"
    with files.locked(path, 0):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        with files.locked(path, 0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# --- where it is ------------------------------------------------------------------------------------------------------


def test_without_a_home_directory_kernels_are_kept_among_temporary_files(monkeypatch, tmp_path):
    monkeypatch.delenv("CUTE_KERNELS_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache, "_usual_directory", lambda: Path("~/.cache/cute-kernels"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    expected = tmp_path / f"cute-kernels-{os.geteuid()}"
    with pytest.warns(RuntimeWarning, match=f"no home directory: compiled kernels are kept in {expected}; CUTE_"):
        assert cache.load_or_build("a", lambda: KERNEL) == KERNEL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load_or_build("a", lambda: pytest.fail("built")) == KERNEL
    assert [path.name for path in tmp_path.iterdir()] == [expected.name]
    assert expected.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("chosen", "expected"), [("{}/x", "{}/x"), ("", "{}/home/.cache"), ("x", "{}/home/.cache")])
def test_the_users_folder(monkeypatch, tmp_path, chosen, expected):
    """A relative XDG_CACHE_HOME is to be ignored."""
    monkeypatch.delenv("CUTE_KERNELS_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    monkeypatch.setenv("XDG_CACHE_HOME", chosen.format(tmp_path))
    assert cache.directory() == Path(expected.format(tmp_path), "cute-kernels")


def test_a_folder_of_that_name_that_others_may_write_is_not_used(monkeypatch, tmp_path):
    monkeypatch.delenv("CUTE_KERNELS_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache, "_usual_directory", lambda: Path("~/.cache/cute-kernels"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"cute-kernels-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="kernels are not cached in .*others may write it") as warned:
        assert cache.load_or_build("a", lambda: KERNEL) == KERNEL
    assert warned[-1].filename == __file__  # who asks for the kernel
    assert not list(folder.iterdir())


def test_without_any_folder_kernels_are_kept_in_memory(monkeypatch):
    monkeypatch.delenv("CUTE_KERNELS_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache, "_usual_directory", lambda: Path("/proc/nowhere/cute-kernels"))
    monkeypatch.setattr(cache, "_can_be_made", lambda path: False)

    def nowhere() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.warns(RuntimeWarning, match="cannot be made: compiled kernels are kept in memory"):
        assert cache.directory() is None


PROGRAM = """
import pwd, sys
def unknown(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")
pwd.getpwuid = unknown
from cute_kernels.commands.cli import main
from cute_kernels.common import files
from cute_kernels.dsl import kernel_cache as cache
for command in ("cache", "doctor"):
    assert main([command]) in (0, 1)
for _ in range(2):
    cache.load_or_build("a", lambda: cache.CompiledKernel("k", "p", b"c", b"o", "h"))
print(cache.directory())
"""


def run_as_unknown(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Commands and compilations as in a container that is started with any user's number, of whom no list knows."""
    dropped = ("HOME", "XDG_CACHE_HOME", "CUTE_KERNELS_CACHE_DIR", "USER", "LOGNAME")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"TMPDIR": str(folder), "PYTHONPATH": str(REPOSITORY)} | variables
    run = run_python("-c", PROGRAM, env=environment, cwd=folder)
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
    return run


def test_a_user_whom_nobody_knows(tmp_path):
    run = run_as_unknown(tmp_path)
    assert run.stdout.splitlines()[-1] == f"{tmp_path}/cute-kernels-{os.geteuid()}"
    assert run.stderr.count("compiled kernels are kept in") == 1
    assert "~" not in os.listdir(tmp_path)


def test_a_folder_that_nobody_may_write(tmp_path):
    """Not even the administrator: warned of once."""
    run = run_as_unknown(tmp_path, CUTE_KERNELS_CACHE_DIR="/proc/kernels")
    assert run.stderr.count("kernels are not cached in /proc/kernels: ") == 1
    assert run.stderr.count("RuntimeWarning") == 1


def test_a_home_directory_whose_names_are_too_long(tmp_path):
    """As one in a folder that is closed to this user, it cannot even be asked for."""
    run = run_as_unknown(tmp_path, HOME=f"/tmp/{'x' * 300}")
    assert run.stdout.splitlines()[-1] == f"{tmp_path}/cute-kernels-{os.geteuid()}"
    assert run.stderr.count("compiled kernels are kept in") == 1


def test_the_home_directory_of_another_user(monkeypatch, tmp_path):
    """HOME=/root in a container that is started with another user's number."""

    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.delenv("CUTE_KERNELS_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache, "_usual_directory", lambda: tmp_path / "root" / "cute-kernels")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache._warn_once.cache_clear()
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="root/cute-kernels cannot be made: comp"):
        patch.setattr(Path, "exists", closed)
        assert cache.directory() == tmp_path / f"cute-kernels-{os.geteuid()}"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_file_system_without_locks_leaves_no_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks"), files.locked(tmp_path / "a.lock", 0):
        pass
    assert str(tmp_path / "a.lock") not in [os.readlink(each) for each in Path("/proc/self/fd").iterdir()
                                            if each.is_symlink()]  # fmt: skip
