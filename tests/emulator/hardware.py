"""EMULATOR_HW=1: every launch of a test that the emulator executes runs on an sm_90 GPU too, with equal results.

`tests.emulator.ptx_launch.launch` is the one place where tests execute hand-written PTX, so the switch is there. A
launch goes to the GPU only after the emulator has executed it without an error: what hangs, races or faults in the
emulator never reaches a real device. The GPU belongs to a worker process that loads the module with the driver's
assembler, with ctypes alone; a kernel that does not end within `PATIENCE` seconds or faults costs that worker, not the
tests.

PTX that the assembler rejects for sm_90a (tensor memory, `.cta_group::2`, newer conversions) is counted and left out.
EMULATOR_HW=assemble needs no GPU: it only asks a ptxas (path in PTXAS) what sm_90a has.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

MODE = os.environ.get("EMULATOR_HW", "")
PATIENCE = 10.0  # seconds until a kernel counts as hanging
ALIGNMENT = 1024  # device buffers lie at the same address modulo this as the host arrays that they mirror


class HardwareFault(RuntimeError):
    """The GPU refused, faulted on or did not finish a launch that the emulator executed."""


class Buffer(NamedTuple):
    """Memory of the host that a kernel may touch; ``addresses``: whether its contents are or hold host addresses."""

    address: int
    data: bytes
    addresses: bool = False


@dataclass(frozen=True)
class Launch:
    """One launch, complete: addresses in ``params`` and ``buffers`` are the host's.

    Attributes:
        kernel: its name; None: the one of the text.
        params: one byte string per kernel parameter.
        buffers: every array that the kernel may touch.
    """

    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    params: tuple[bytes, ...]
    buffers: tuple[Buffer, ...]
    kernel: str | None = None


@dataclass
class Tally:
    """What became of the launches of this process."""

    compared: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    device: str = ""


TALLY = Tally()


def for_sm90(ptx: str, newest: tuple[int, int] = (8, 0)) -> str:
    """The text with target sm_90a, and an ISA version that a driver knows."""
    version = re.search(r"\.version\s+(\d+)\.(\d+)", ptx)
    if version is not None and (int(version[1]), int(version[2])) > newest:
        ptx = ptx.replace(version[0], f".version {newest[0]}.{newest[1]}")
    return re.sub(r"\.target\s+sm_\w+", ".target sm_90a", ptx)


@contextlib.contextmanager
def compared(launch: Launch, arrays: Sequence[np.ndarray], *, leave_out: str | None) -> Iterator[None]:
    """Around the emulator's execution of a launch: runs it on the GPU afterwards and compares ``arrays`` bit for bit.

    Args:
        launch: made before the emulator changes the arrays.
        arrays: of `Launch.buffers`, in its order.
        leave_out: why a GPU need not give the same bytes, or None.

    Raises:
        AssertionError: the GPU left other bytes.
        HardwareFault: the GPU did not execute it.
    """
    yield
    if not MODE:
        return
    if leave_out is not None:
        TALLY.left_out[leave_out] += 1
        return
    if MODE == "assemble":
        reason = _assemble(launch.ptx)
    else:
        reason, results = _worker().run(launch)
    if reason is not None:
        TALLY.left_out[f"not in sm_90a: {reason}"] += 1
        return
    TALLY.compared += 1
    if MODE == "assemble":
        return
    for number, (array, result) in enumerate(zip(arrays, results, strict=True)):
        emulated = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        real = np.frombuffer(result, np.uint8)
        different = np.flatnonzero(emulated != real)
        if len(different):
            first = int(different[0]) // 4 * 4
            raise AssertionError(
                f"array {number}: {len(different)} of {real.size} bytes differ from {TALLY.device}, first at byte "
                f"{int(different[0])}: emulated {emulated[first : first + 4].tobytes()[::-1].hex()}, "
                f"GPU {real[first : first + 4].tobytes()[::-1].hex()}"
            )


@functools.lru_cache(maxsize=1024)
def _assemble(ptx: str) -> str | None:
    """What ptxas rejects in a text for sm_90a, or None."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(for_sm90(ptx, (8, 8)))
        command = [os.environ["PTXAS"], "-arch=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else summary(done.stderr)


def summary(log: str) -> str:
    """The first error of an assembler's log, without line numbers and with registers made equal."""
    errors = [line for line in log.splitlines() if "error" in line.lower() or "fatal" in line.lower()] or [log.strip()]
    text = re.sub(r"^.*line \d+;\s*", "", errors[0]) if errors else ""
    return re.sub(r"\d+", "N", text)[:160]


# --- the side of the tests ------------------------------------------------------------------------------------------


class Worker:
    """The process that owns the GPU; started again after a fault."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "tests.emulator.hardware")) -> None:
        self.command = list(command)
        self.process: subprocess.Popen | None = None

    def run(self, launch: Launch) -> tuple[str | None, list[bytes]]:
        """(None, contents of the buffers), or (what the assembler said, []).

        Raises:
            HardwareFault: a fault, a hang, or a machine without a suitable GPU.
        """
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            TALLY.device = self._read()[1]
        pickle.dump(launch, self.process.stdin)
        self.process.stdin.flush()
        kind, answer = self._read()
        if kind == "rejected":
            return summary(answer), []
        return None, answer

    def _read(self) -> tuple[str, object]:
        try:
            kind, answer = pickle.load(self.process.stdout)
        except EOFError:
            kind, answer = "fault", f"the worker ended with {self.process.wait()}"
        if kind == "fault":
            self.stop()
            raise HardwareFault(answer)
        return kind, answer

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


_WORKERS: list[Worker] = []


def _worker() -> Worker:
    if not _WORKERS:
        _WORKERS.append(Worker())
        atexit.register(_WORKERS[0].stop)
    return _WORKERS[0]


# --- addresses ------------------------------------------------------------------------------------------------------


# --- the side of the GPU --------------------------------------------------------------------------------------------


class Rejected(Exception):
    """The assembler does not take the text for this GPU; the message is its log."""


class Executor(Protocol):
    """What a worker owns: `tests.emulator.driver.Device`, or a stand-in."""

    name: str

    def execute(self, launch: Launch, patience: float) -> list[bytes]:
        """See `tests.emulator.driver.Device.execute`."""


def serve(make: Callable[[], Executor]) -> None:
    """Serves launches from stdin until it ends: pickled `Launch` in, pickled (kind, answer) out."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not disturb the answers

    def answer(kind: str, value: object) -> None:
        pickle.dump((kind, value), output)
        output.flush()

    try:
        device = make()
        answer("ready", device.name)
        while True:
            try:
                launch = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                answer("done", device.execute(launch, PATIENCE))
            except Rejected as error:
                answer("rejected", str(error))
    except (OSError, RuntimeError) as error:
        answer("fault", str(error))
        os._exit(1)  # a context with a running kernel would not let the process end


if __name__ == "__main__":
    # Imported by name: the classes of this file are otherwise those of __main__, which pickle cannot find elsewhere.
    from tests.emulator.driver import Device
    from tests.emulator.hardware import serve as serve_by_name

    serve_by_name(Device)
