"""Conditions of breakpoints, what watchpoints look at, and which operation has changed it."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.emulator.checking import inspection
from cute_kernels.emulator.isa.ptx.program import Kernel
from cute_kernels.emulator.machine.state.async_engine import AsyncOp
from cute_kernels.emulator.machine.units.sm import Warp

_SIGNS = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_CONDITION = re.compile(r"(%\S+?)\s*(==|!=|<=|>=|<|>)\s*(\S+)")


def condition(text: str, kernel: Kernel) -> Callable[[Warp], bool]:
    """Whether a condition ``REGISTER SIGN NUMBER`` holds in a lane that executes. Raises ValueError: no such condition
    or register; out of the function: a register whose value is not kept."""
    found = _CONDITION.fullmatch(text.strip())
    if found is None or found[1] not in kernel.registers:
        raise ValueError(f"condition = {text!r}: must be REGISTER {' '.join(_SIGNS)} NUMBER, of the kernel's registers")
    register, sign, number = found.groups()
    kind = kernel.registers[register]
    try:
        wanted = float(number) if kind in ("f32", "f64") else int(number, 0)
    except ValueError:
        raise ValueError(f"condition = {text!r}: must end with a number of type {kind}") from None

    def holds(warp: Warp) -> bool:
        lanes = inspection.active_lanes(warp) >> np.arange(32) & 1 == 1
        values = np.broadcast_to(inspection.registers(warp, [register])[register], 32)[lanes]
        bits = int(kind[1:]) if kind[1:].isdecimal() else 1
        if kind in ("f32", "f64", "s8", "s16", "s32", "s64"):
            values = values.astype(f"u{bits // 8}").view(f"<{kind[0].replace('s', 'i')}{bits // 8}")
        return bool(_SIGNS[sign](values, wanted).any())

    return holds


@dataclass
class Watch:
    """Something that a launch stops behind a change of."""

    text: str  # what, in words
    read: Callable[[], np.ndarray | None]  # its value now; None: it has none, as where its warp does not run
    last: np.ndarray | None = None  # what it was

    def change(self) -> str:
        """How it has changed since the last call, in words, or ""."""
        before, self.last = self.last, self.read()
        now = self.last
        if before is None or now is None or before.shape != now.shape:
            return ""
        differs = np.argwhere(before.view(np.uint8) != now.view(np.uint8))
        if not len(differs):
            return ""
        index = tuple(np.argwhere(before != now)[0]) if (before != now).any() else tuple(differs[0])
        where = f"[{', '.join(map(str, index))}]" if before.size > 1 else ""
        return f"{self.text}{where} {before[index]} -> {now[index]}"


def watch(debugger: Any, text: str, warp: str) -> Watch:
    """A watchpoint of `Debugger.watch`. Raises ValueError: nothing that can be watched."""
    kind, _, name = text.strip().partition(" ")
    rest = [name] if kind == "tile" else name.split()
    reads: dict[str, tuple[tuple[int, int], Callable[..., Any]]] = {
        "register": ((1, 1), lambda name: np.atleast_1d(debugger.registers(warp, name)[name])),
        "tile": ((1, 1), lambda name: np.atleast_1d(debugger.tile(name, warp=warp))),
        "shared": ((1, 2), lambda name, count=None: debugger.shared(_place(name), _count(count), warp)),
        "memory": ((2, 2), lambda address, count: debugger.memory(_place(address), int(count, 0))),
        "barrier": ((1, 1), lambda name: np.array([debugger.phase(name, warp)])),
    }
    if kind not in reads or not reads[kind][0][0] <= len(rest) <= reads[kind][0][1]:
        raise ValueError(
            f"watchpoint = {text!r}: must be register NAME, tile NAME[INDEX], shared NAME or OFFSET [COUNT], "
            "memory ADDRESS COUNT, or barrier NAME or OFFSET"
        )

    def read() -> np.ndarray | None:
        try:
            return reads[kind][1](*rest)
        except ValueError:  # the warp does not run, or nothing reads the register from here on
            return None

    if debugger.warps():
        reads[kind][1](*rest)
    return Watch(text.strip(), read)


def _place(text: str) -> int | str:
    return int(text, 0) if text[:1].isdecimal() else text


def _count(text: str | None) -> int | None:
    return None if text is None else int(text, 0)


class Completed:
    """Asynchronous operations of a cluster that have taken effect since they were asked for: an `Observer`."""

    def __init__(self) -> None:
        self._issued: dict[int, AsyncOp] = {}
        self._ended: list[str] = []

    def take(self) -> list[str]:
        """Names of the operations that have taken effect since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def issued(self, number: int, op: AsyncOp) -> None:
        self._issued[number] = op

    def ends(self, number: int, failed: bool) -> None:
        op = self._issued.pop(number, None)
        if op is not None:
            self._ended.append(op.describe)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("at", "begins", "completed", "passed", "operated"):
            raise AttributeError(name)
        return lambda *_: None
