"""The disk cache: what is stored is loaded, what is damaged, foreign or writable by others is not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import cutlass
import pytest

from cute_kernels.commands.cli import main
from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig
from cute_kernels.dsl import kernel_cache as cache
from cute_kernels.dsl.allocations import Allocation, Allocations, View
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.units.copies.tensor_map import decode
from cute_kernels.emulator.programs import host
from cute_kernels.operations import compile
from cute_kernels.plan import make_plan

KEY = ("sm_90a", Sm90PatchEmbedConfig(), True, "value", 6)
HELD = Allocations(
    "kernel_0", (Allocation(0, 64, (("a.py", 3, 4), ("b.py", 5, 0))),), (Allocation(0, 8, (), (("x", 0, 8),)),), True,
    (View(None, "tensor", 0, 32, "f32", "", "((128,64),1,1):((65536,1),0,0)", (("a.py", 7, 1),)),),
)  # fmt: skip
KERNEL = cache.CompiledKernel(
    "kernel_0", ".entry kernel_0()", b"\x7fELF cubin", b"\x7fELF host\x00", "kernel_0_host", HELD
)
OTHER = dataclasses.replace(KERNEL, ptx="another")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def unreachable() -> cache.CompiledKernel:
    raise AssertionError("built in spite of a usable entry")


def stored(root: Path) -> Path:
    """An entry for KEY, and its path."""
    assert cache.load_or_build(KEY, lambda: KERNEL) == KERNEL
    (path,) = root.glob("*.kernel")
    return path


def test_an_entry_is_loaded_and_not_built_again(root):
    stored(root)
    assert cache.load_or_build(KEY, unreachable) == KERNEL
    assert root.stat().st_mode & 0o777 == 0o700


def test_other_keys_are_other_entries(root):
    stored(root)
    other = (*KEY[:1], dataclasses.replace(KEY[1], stages=3), *KEY[2:])
    assert cache.load_or_build(other, lambda: OTHER) == OTHER
    assert len(list(root.glob("*.kernel"))) == 2
    assert cache.load_or_build(KEY, unreachable) == KERNEL


def test_every_single_byte_is_protected(root):
    """Any byte changed, the entry cut anywhere or extended: refused, never half-read."""
    content = stored(root).read_bytes()
    for index in range(len(content)):
        damaged = bytearray(content)
        damaged[index] ^= 1 << index % 8
        with pytest.raises(cache.InvalidEntry):
            cache.decode(bytes(damaged), KEY)
        with pytest.raises(cache.InvalidEntry):
            cache.decode(content[:index], KEY)
    with pytest.raises(cache.InvalidEntry):
        cache.decode(content + b"\0", KEY)
    assert cache.decode(content, KEY) == KERNEL


def test_an_entry_without_all_sections_is_refused():
    """Intact, and of this very kernel, but with nothing to launch."""
    fewer = dataclasses.make_dataclass("Fewer", ["kernel_name", "ptx", "cubin", "host_prefix"])
    values = {field.name: getattr(KERNEL, field.name) for field in dataclasses.fields(fewer)}
    with pytest.raises(cache.InvalidEntry, match=r"it has sections \['cubin', 'host_prefix', 'kernel_name', 'ptx'\]"):
        cache.decode(cache.encode(KEY, fewer(**values)), KEY)


def with_another_header(path: Path) -> None:
    """Intact, and by somebody who calls another format by the same magic number."""
    body = cache.MAGIC + (2).to_bytes(8, "little") + b"[]"
    path.write_bytes(body + hashlib.sha256(body).digest())


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 0x10
    path.write_bytes(bytes(content))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def of_another_kernel(path: Path) -> None:
    path.write_bytes(cache.encode(("sm_100a",), OTHER))


def writable_by_others(path: Path) -> None:
    path.chmod(0o666)


def a_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def a_named_pipe(path: Path) -> None:
    """Opening one for reading would wait for a writer for ever."""
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    "spoil", [damage, empty, of_another_kernel, with_another_header, writable_by_others, a_link, a_named_pipe]
)
def test_an_unusable_entry_is_rebuilt(root, spoil):
    path = stored(root)
    spoil(path)
    with pytest.warns(RuntimeWarning, match="is rebuilt: "):
        assert cache.load_or_build(KEY, lambda: OTHER) == OTHER
    assert cache.load_or_build(KEY, unreachable) == OTHER, "the rebuilt entry is used from then on"


def test_an_entry_of_other_sources_or_versions_is_rebuilt(root, monkeypatch):
    """It has another name already; under the same name it is refused all the same."""
    path = stored(root)
    monkeypatch.setattr(cache, "fingerprint", lambda: "other")
    assert cache.entry_path(root, KEY) != path
    path.rename(cache.entry_path(root, KEY))
    with pytest.warns(RuntimeWarning, match="made by other sources"):
        assert cache.load_or_build(KEY, lambda: OTHER) == OTHER


def test_the_fingerprint_covers_sources_versions_and_platform(monkeypatch):
    origin = cache._origin()
    generating = {"kernels/sm90/transposed.py", "kernels/sm100/cta_pair.py", "plan/patch_embed_sm90.py"}
    assert {*generating, "operations/compile.py"} <= set(origin["sources"])
    assert origin["dsl"]["nvidia-cutlass-dsl"] == cutlass.__version__
    assert any(name.startswith("nvidia-cutlass-dsl-libs-cu") for name in origin["dsl"])
    assert origin["python"][1:] == list(sys.version_info[:3])


def test_the_fingerprint_names_the_version_that_is_imported(monkeypatch):
    """Of two on the path, as in a virtual environment over a system installation: the first."""

    def installed(version: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(metadata={"Name": "nvidia_cutlass_dsl"}, version=version)

    monkeypatch.setattr(cache.metadata, "distributions", lambda: [installed("4.8.0"), installed("4.8.1")])
    assert cache._origin()["dsl"] == {"nvidia-cutlass-dsl": "4.8.0"}


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_may_write_is_not_used(root, mode):
    root.mkdir()
    root.chmod(mode)
    with pytest.warns(RuntimeWarning, match="others may write it"):
        assert cache.load_or_build(KEY, lambda: KERNEL) == KERNEL
    assert not list(root.iterdir())


def test_a_file_in_place_of_the_directory_only_costs_the_cache(root):
    root.write_text("not a directory")
    with pytest.warns(RuntimeWarning, match="not cached"):
        assert cache.load_or_build(KEY, lambda: KERNEL) == KERNEL


def test_an_error_of_the_build_is_raised_once_and_stores_nothing(root):
    calls = []

    def fail() -> cache.CompiledKernel:
        calls.append(1)
        raise OSError("no space left for the compiler")

    with pytest.raises(OSError, match="for the compiler"):
        cache.load_or_build(KEY, fail)
    assert len(calls) == 1
    assert not list(root.glob("*.kernel"))


def test_off_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "off")
    monkeypatch.chdir(tmp_path)
    assert cache.load_or_build(KEY, lambda: KERNEL) == KERNEL
    assert not list(tmp_path.iterdir())


def test_concurrent_processes_build_once(root, tmp_path):
    """Six processes ask at the same time; each says whether it built, and all get the same kernel."""
    program = (
        "import sys, time, json; from cute_kernels.dsl import kernel_cache as cache\n"
        "def build():\n"
        "    print('built'); time.sleep(0.3)\n"
        "    return cache.CompiledKernel('k', sys.argv[1], b'c', b'o', 'p')\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(json.dumps(cache.load_or_build('key', build).ptx))"
    )
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([sys.executable, "-c", program, str(i)], **piped) for i in range(6)]
    assert [run.stdout.readline() for run in runs] == ["ready\n"] * 6
    for run in runs:
        print(file=run.stdin, flush=True)
    outputs = [run.communicate(timeout=300)[0].split() for run in runs]
    assert sorted(len(lines) for lines in outputs) == [1, 1, 1, 1, 1, 2], "exactly one built"
    (builder,) = [index for index, lines in enumerate(outputs) if len(lines) == 2]
    assert {json.loads(lines[-1]) for lines in outputs} == {str(builder)}


PLAN = make_plan(PatchEmbedProblem(14 * 37, 264, 144, 14), Sm90PatchEmbedConfig(tile_rows=32, stages=2))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[bool, tuple[compile.Artifact, Path]]:
    """A kernel compiled for the GPU and for the emulator, and the entry that each of them made."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for emulated in (False, True):
            folder = tmp_path_factory.mktemp("cache")
            patch.setenv("CUTE_KERNELS_CACHE_DIR", str(folder))
            patch.setattr(compile, "_CACHE", {})
            artifact = compile.compile_plan(PLAN, emulated=emulated)
            (entry,) = folder.glob("*.kernel")
            found[emulated] = artifact, entry
    return found


@pytest.fixture
def from_disk(compiled, root, monkeypatch) -> None:
    """Nothing is compiled: what there is was made for the GPU."""
    _, entry = compiled[False]
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(entry.parent))
    monkeypatch.setattr(compile, "_CACHE", {})
    monkeypatch.setattr(compile, "build", unreachable)


def test_a_kernel_from_disk_is_the_compiled_kernel(compiled, from_disk):
    """Same code and resources, and a host function, without tracing or compiling."""
    artifact, _ = compiled[False]
    loaded = compile.compile_plan(PLAN)
    assert loaded is not artifact
    assert (loaded.kernel_name, loaded.ptx, loaded.cubin) == (artifact.kernel_name, artifact.ptx, artifact.cubin)
    assert loaded.resources == artifact.resources
    assert callable(loaded.function.call) and callable(artifact.function.call)


def test_entries_do_not_depend_on_what_executes_the_kernel(compiled):
    assert compiled[False][1].read_bytes() == compiled[True][1].read_bytes()


def recorded(artifact: compile.Artifact, given: dict[str, int]) -> CapturedLaunch:
    """A launch, of its parameters the tensor maps: host code leaves padding bytes of others as they are in memory."""
    launch = host.record(artifact.function, *compile.host_arguments(PLAN, **given, stream=0))
    return dataclasses.replace(launch, params=tuple(decode(p) for p in launch.params if len(p) == 128))


def test_a_kernel_from_disk_is_emulated_as_the_compiled_one(compiled, from_disk):
    """Its host function makes the same launch, tensor maps included, again and again, and tells the emulator of it."""
    given = {operand.name: 4096 * i for i, operand in enumerate(PLAN.operands, 1) if operand.given}
    artifact, _ = compiled[True]
    expected = recorded(artifact, given)
    assert expected.ptx == artifact.ptx and len(expected.params) > 1
    loaded = compile.compile_plan(PLAN, emulated=True)
    assert recorded(loaded, given) == expected
    assert recorded(loaded, {name: address + 4096 for name, address in given.items()}) != expected
    assert recorded(loaded, given) == expected
    with pytest.raises(EmulatorError, match="outside record"):
        loaded.function(*compile.host_arguments(PLAN, **given, stream=0))
    with pytest.raises(EmulatorError, match="not compiled under host.recording_runtime"):
        host.record(compile.compile_plan(PLAN).function)


def test_command_counts_and_clears(root, capsys):
    path = stored(root)
    damage(path)
    cache.load_or_build("another key", lambda: OTHER)
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    nbytes = sum(each.stat().st_size for each in root.glob("*.kernel"))
    assert f"2 kernels, {nbytes:,} bytes of at most " in out and str(root) in out
    assert main(["cache", "--clear"]) == 0
    assert f"2 kernels deleted from {root};" in capsys.readouterr().out
    assert not list(root.iterdir())
    assert main(["cache"]) == 0
    assert "0 kernels" in capsys.readouterr().out


def test_clearing_deletes_only_what_the_cache_wrote(root, capsys):
    path = stored(root)
    key = path.stem
    abandoned = root / f"{key}ab_d3f9h.tmp"  # a process died between mkstemp and rename
    abandoned.write_bytes(b"half")
    assert (root / f"{key}.lock").exists()
    foreign = {
        "linux-6.1.kernel": cache.MAGIC,  # the name is not ours
        f"{'0' * 40}.kernel": b"\x7fELF",  # the content is not
        f"{'A' * 40}.kernel": cache.MAGIC,
        f"{'0' * 40}.kernel.old": cache.MAGIC,
        "poetry.lock": b"",
        "upload.tmp": b"",
        f"{'0' * 39}.lock": b"",
        "notes.txt": b"",
    }
    for name, content in foreign.items():
        (root / name).write_bytes(content)
    elsewhere = root / "elsewhere"
    elsewhere.write_bytes(path.read_bytes())
    (root / f"{'1' * 40}.kernel").symlink_to(elsewhere)
    (root / f"{'2' * 40}.lock").mkdir()
    kept = {*foreign, "elsewhere", f"{'1' * 40}.kernel", f"{'2' * 40}.lock"}

    assert cache.entries(root) == (2, 4 + path.stat().st_size)
    assert main(["cache", "--clear"]) == 0
    assert f"1 kernel deleted from {root};" in capsys.readouterr().out
    assert {p.name for p in root.iterdir()} == kept
    assert all((root / name).read_bytes() == content for name, content in foreign.items())


@pytest.mark.parametrize("value", ["", ".", "kernels", "../cache", "OFF", "~nobody-of-that-name/cache"])
def test_a_directory_that_depends_on_where_one_stands_is_refused(value, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poetry.lock").touch()
    with pytest.raises(ValueError, match=f"^CUTE_KERNELS_CACHE_DIR = '{value}': must be an absolute path"):
        cache.load_or_build(KEY, unreachable)
    assert main(["cache", "--clear"]) == 2
    assert "CUTE_KERNELS_CACHE_DIR = " in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["poetry.lock"]
    assert main(["doctor"]) == 1
    assert f"CUTE_KERNELS_CACHE_DIR = '{value}'" in capsys.readouterr().out


def test_a_home_directory_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "~/kernels")
    assert cache.directory() == tmp_path / "kernels"


def test_an_entry_that_cannot_be_linked_is_compiled_anew(root, monkeypatch):
    """As one that calls a library which this process has not: with a warning, once, and the entry is right again."""
    monkeypatch.setattr(compile, "_CACHE", {})
    kernel = compile.build(PLAN)
    strange = kernel.host_object.replace(b"_cudaLaunchKernelEx\0", b"_elsewhereLaunchEx1\0")
    assert strange != kernel.host_object
    cache.load_or_build(PLAN.kernel_key, lambda: dataclasses.replace(kernel, host_object=strange))
    for emulated in (True, False):
        monkeypatch.setattr(compile, "_CACHE", {})
        artifact = compile.compile_plan(PLAN, emulated=emulated)
        if emulated:
            with pytest.warns(RuntimeWarning, match="is rebuilt: it cannot be linked: nothing defines _elsewhereL"):
                assert artifact.function is artifact.function
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert artifact.function is artifact.function
    assert cache.load_or_build(PLAN.kernel_key, unreachable) == kernel


FROM_DISK = """
import sys
from cute_kernels.operations import compile
from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig
from cute_kernels.emulator.programs import host
from cute_kernels.plan import make_plan
plan = make_plan(PatchEmbedProblem(14 * 37, 264, 144, 14), Sm90PatchEmbedConfig(tile_rows=32, stages=2))
given = {operand.name: 4096 * i for i, operand in enumerate(plan.operands, 1) if operand.given}
artifact = compile.compile_plan(plan, emulated=True)
launch = host.record(artifact.function, *compile.host_arguments(plan, **given, stream=0))
assert launch.kernel_name == artifact.kernel_name
compile.compile_plan(plan).function.call  # linked with the CUDA runtime
print(sorted({name.split(".")[0] for name in sys.modules} & {"cutlass", "cuda", "torch"}))
"""


def test_nothing_of_cute_dsl_is_imported_for_a_stored_kernel(compiled):
    environment = os.environ | {"CUTE_KERNELS_CACHE_DIR": str(compiled[False][1].parent)}
    run = subprocess.run([sys.executable, "-c", FROM_DISK], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "[]\n", "")
