"""Runs a damaged program and decides whether it ended as it has to."""

from __future__ import annotations

import ctypes
import linecache
import math
import mmap
import re
import tempfile
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import cute_kernels
from cute_kernels.emulator import EmulatorError, GlobalMemory, Options, run
from cute_kernels.emulator.errors import Hang
from cute_kernels.emulator.programs.recorded import Relocation
from tests.emulator.fuzz.program import Program
from tests.emulator.oracle.launches import address_of

PACKAGE = str(Path(cute_kernels.__file__).parent)
INSTRUCTIONS, BLOCKS = 6_000, 20_000  # of a launch, so that an endless loop is soon reported
_MOST_CTAS = 16  # of larger grids only the first and the last cluster run
_ALIGNMENT = 128
_VALUE = re.compile(r"\d|'|\(\)|None")
_NO_ACCESS = 0  # PROT_NONE
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Verdict:
    """How a program ended. ``finding``: what is wrong with that, or empty; ``place``: where it was raised."""

    outcome: str
    finding: str = ""
    place: str = ""


def guarded(content: bytes) -> np.ndarray:
    """Global memory that ends, but for its alignment, at a page that nobody may touch."""
    page = mmap.PAGESIZE
    used = -(-len(content) // _ALIGNMENT) * _ALIGNMENT
    room = -(-max(used, 1) // page) * page
    area = mmap.mmap(-1, room + page)
    whole = np.frombuffer(area, np.uint8)
    if _LIBC.mprotect(ctypes.c_void_p(whole.ctypes.data + room), ctypes.c_size_t(page), _NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
    memory = whole[room - used : room - used + len(content)]
    memory[:] = np.frombuffer(content, np.uint8)
    return memory


def execute(program: Program) -> None:
    """Runs it on fresh memory."""
    arrays = [guarded(content) for content in program.buffers]
    moved = Relocation(tuple((address_of(i), array.ctypes.data, array.nbytes) for i, array in enumerate(arrays)))
    for array in arrays:
        array[:] = np.frombuffer(moved.words(array.tobytes()), np.uint8)
    memory = GlobalMemory()
    for i, array in enumerate(arrays):
        memory.register_tensor(array, f"buffer {i}")
    options = {"max_warp_instructions": INSTRUCTIONS, "max_idle_blocks": BLOCKS, **program.options}
    sizes = [*program.grid[:3], *program.cluster[:3]]
    if min(sizes) > 0 and math.prod(program.grid) > _MOST_CTAS:
        options["clusters"] = (0, max(0, math.prod(program.grid) // math.prod(program.cluster) - 1))
    if options.get("going_on"):
        options["going_on"] = lambda error: True
    with tempfile.TemporaryDirectory(prefix="cute-kernels-fuzz-") if options.get("trace") else nullcontext() as folder:
        if folder is not None:
            options["trace"] = Path(folder, "trace.json")
        run(
            program.text, grid=program.grid, block=program.block, cluster=program.cluster, dynamic_smem=program.shared,
            params=[moved.words(value) for value in program.params], memory=memory, options=Options(**options),
        )  # fmt: skip


def judge(program: Program) -> Verdict:
    """Whether a program ends in success or in an error of the emulator's own that says what is wrong.

    An error of the emulator names a line of the PTX or its .target, unless it is a hang, which lists who waits.
    ValueError and TypeError are for shapes, parameters and options, and quote the value. They have to be raised by the
    package on purpose: one that a library raises about the package's own arguments names nothing that a user has given.
    """
    try:
        execute(program)
    except EmulatorError as error:
        cause = error.__cause__
        if error.message.startswith("internal error") and cause is not None:
            return Verdict(type(error).__name__, f"internal error: {type(cause).__name__}: {cause}", _place(cause))
        if not error.message.strip():
            return Verdict(type(error).__name__, "an error without a message", _place(error))
        named = error.ptx_line is not None or ".target" in error.message
        if not named and not isinstance(error, Hang):
            return Verdict(type(error).__name__, f"an error that names no line of the PTX: {error}", _place(error))
        return Verdict(type(error).__name__)
    except (ValueError, TypeError) as error:
        if _on_purpose(error):
            if not _VALUE.search(str(error)):
                return Verdict(type(error).__name__, f"an error that names no value: {error}", _place(error))
            return Verdict(type(error).__name__)
        return Verdict(type(error).__name__, f"{type(error).__name__}: {error}", _place(error))
    except Exception as error:
        return Verdict(type(error).__name__, f"{type(error).__name__}: {error}", _place(error))
    return Verdict("success")


def _on_purpose(error: BaseException) -> bool:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno).lstrip()
    return frame.filename.startswith(PACKAGE) and line.startswith("raise")


def _place(error: BaseException) -> str:
    """The innermost line of the package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(PACKAGE)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside of the package"
