"""EMULATOR_HW without a GPU: the worker's protocol with stand-ins for the device, which execute in the emulator."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator.errors import Hang
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator import hardware
from tests.emulator.hardware import HardwareFault, Tally, Worker, for_sm90
from tests.emulator.ptx_launch import launch

REPOSITORY = Path(__file__).resolve().parents[2]

# A device whose memory lies elsewhere: nothing works unless every address in parameters and buffers is moved. What it
# does wrong depends on the first byte of the last buffer: 1 = flips a bit, 2 = dies, 3 = rejects the text.
STAND_IN = """
import os
from cute_kernels.emulator.programs.recorded import Relocation
from tests.emulator.hardware import Launch, Rejected, serve
import numpy as np
from cute_kernels.emulator import GlobalMemory, run

class Device:
    name = "stand-in"
    def execute(self, launch, patience):
        mode = launch.buffers[-1][1][0]
        if mode == 2:
            os._exit(7)
        if mode == 3:
            raise Rejected("ptxas k.ptx, line 7; error   : Feature 'x' requires .target sm_100 or higher")
        stores = [np.zeros(len(data) + 2048, np.uint8) for _, data, _ in launch.buffers]
        skips = [(host - store.ctypes.data) % 1024 for store, (host, _, _) in zip(stores, launch.buffers)]
        views = [s[k : k + len(data)] for s, k, (_, data, _) in zip(stores, skips, launch.buffers)]
        moved = Relocation(tuple((h, v.ctypes.data, v.nbytes) for v, (h, _, _) in zip(views, launch.buffers)))
        memory = GlobalMemory()
        for view, (_, data, addresses) in zip(views, launch.buffers):
            view[:] = np.frombuffer(moved.words(data) if addresses else data, np.uint8)
            memory.register_tensor(view, "array")
        run(launch.ptx, grid=launch.grid, block=launch.block, cluster=launch.cluster, memory=memory,
            dynamic_smem=launch.dynamic_smem, params=[moved.words(value) for value in launch.params])
        if mode == 1:
            views[0][13] ^= 1
        return [moved.words(view.tobytes(), back=True) for view in views]

serve(Device)
"""

# Thread i stores the address of its own output word beside the word that TMA brought from the tensor.
PROGRAM = (
    THREAD_OUTPUT.replace("%r1, 4", "%r1, 16")
    + """
ld.param.u64 %d2, [p1]; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
mbarrier.init.shared.b64 [dynamic], 1; mbarrier.arrive.expect_tx.shared.b64 %d3, [dynamic], 128;
cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [dynamic+128], [%d2, {8}], [dynamic];
READY: bar.sync 0;
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic], 0; @!%p2 bra WAIT;
mov.b32 %r2, dynamic; mad.lo.u32 %r3, %r1, 4, %r2; ld.shared.b32 %r4, [%r3+128];
cvt.u64.u32 %d4, %r4; st.global.v2.b64 [%d1], {%d1, %d4}; ret;"""
)


@pytest.fixture(scope="module")
def process() -> Iterator[Worker]:
    stand_in = Worker((sys.executable, "-c", STAND_IN))
    yield stand_in
    stand_in.stop()


@pytest.fixture
def worker(process: Worker, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(hardware, "MODE", "1")
    monkeypatch.setattr(hardware, "TALLY", Tally(device="stand-in"))
    monkeypatch.setattr(hardware, "_WORKERS", [process])
    return process


def execute(mode: int) -> np.ndarray:
    tensor = aligned(np.arange(100, 164, dtype=np.uint32))
    tensor_map = TensorMap(tensor.ctypes.data, "u32", (64,), (), (32,), (1,))
    out = np.zeros((32, 2), np.uint64)
    switch = np.full(8, mode, np.uint8)
    launch(module(PROGRAM, parameters=4), out, tensor_map, tensor, switch)
    assert out[:, 0].tolist() == [out.ctypes.data + 16 * i for i in range(32)]
    assert out[:, 1].tolist() == list(range(108, 140))
    return out


def test_addresses_in_parameters_tensor_maps_and_results_are_moved(worker: Worker) -> None:
    execute(0)
    execute(0)
    assert hardware.TALLY.compared == 2 and hardware.TALLY.device == "stand-in"


def test_data_that_looks_like_an_address_is_left_alone(worker: Worker) -> None:
    """Operands of 32 bits can be an address of the host, and are one in some processes and not in others."""
    data, switch = np.zeros(4, np.uint64), np.zeros(8, np.uint8)
    data[:] = data.ctypes.data + 8
    text = "ld.param.u64 %d0, [p0]; ld.global.b64 %d1, [%d0]; not.b64 %d1, %d1; st.global.b64 [%d0+8], %d1; ret;"
    launch(module(text), data, switch)
    assert hardware.TALLY.compared == 1 and data[1] == ~data[0]


def test_a_different_byte_is_reported(worker: Worker) -> None:
    with pytest.raises(AssertionError, match=r"array 0: 1 of 512 bytes differ from stand-in, first at byte 13"):
        execute(1)


def test_a_fault_costs_the_worker_and_not_the_next_launch(worker: Worker) -> None:
    with pytest.raises(HardwareFault, match="the worker ended with 7"):
        execute(2)
    execute(0)
    assert hardware.TALLY.compared == 1


def test_what_the_gpu_does_not_have_is_counted(worker: Worker) -> None:
    execute(3)
    launch(module("ret;"), 0, 0, hardware="a reason")
    assert hardware.TALLY.compared == 0
    expected = {"not in sm_90a: error   : Feature 'x' requires .target sm_N or higher": 1, "a reason": 1}
    assert dict(hardware.TALLY.left_out) == expected


def test_a_launch_that_the_emulator_reports_never_reaches_the_gpu(worker: Worker) -> None:
    with pytest.raises(Hang, match="hangs"):
        launch(module("L: bra L;"), 0, 0)
    assert hardware.TALLY.compared == 0 and not hardware.TALLY.left_out


def test_without_a_gpu_the_real_worker_says_so() -> None:
    same = hardware.Launch(module("ret;"), (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, (bytes(8), bytes(8)), ())
    try:
        reason, _ = Worker().run(same)
    except HardwareFault as error:
        assert "libcuda" in str(error) or "cuInit" in str(error) or "9.0 is needed" in str(error)
    else:
        assert reason is None


@pytest.mark.parametrize(
    ("given", "newest", "expected"),
    [("8.8", (8, 0), "8.0"), ("8.8", (9, 0), "8.8"), ("8.0", (8, 7), "8.0"), ("9.1", (8, 7), "8.7")],
)
def test_the_text_for_a_gpu(given: str, newest: tuple[int, int], expected: str) -> None:
    text = for_sm90(f".version {given}\n.target sm_100a\n.address_size 64\n", newest)
    assert text == f".version {expected}\n.target sm_90a\n.address_size 64\n"


def _imports(path: Path) -> set[Path]:
    """Modules of this repository that a file imports from."""
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    names |= {node.module for node in imports if node.module}
    return {file for name in names if (file := REPOSITORY / (name.replace(".", "/") + ".py")).is_file()}


def test_make_hardware_runs_every_file_that_launches_ptx():
    folder = REPOSITORY / "tests" / "emulator"
    mutants = folder / "checking" / "mutation"  # which may do anything to a GPU
    tests = {path for path in (REPOSITORY / "tests").rglob("test_*.py") if not path.is_relative_to(mutants)}
    modules = {folder / "ptx_launch.py"}
    while more := {path for path in set(folder.glob("*.py")) - tests - modules if _imports(path) & modules}:
        modules |= more
    command = ["make", "--dry-run", "hardware"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert {path.name for path in tests if _imports(path) & modules} == set(re.findall(r"test_\w+\.py", listed))
