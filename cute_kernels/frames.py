"""Argument frames: what the machine code of a host function is called with, by the table of a plan's operands.

CuTe DSL's own call converts and checks its Python objects one by one, which takes longer than the launch. The machine
code underneath takes an array of pointers, one to each argument, and a last one to the status it returns. A frame keeps
both, and a launch writes the arguments that differ.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from cute_kernels.plan import Plan

_SLOT = 8
"""Bytes between arguments in memory."""

_FORMATS = {"pointer": "=Q", "float32": "=f", "int32": "=i"}
"""How `struct` writes an argument."""


class Frames(threading.local):
    """Argument values of one thread, and the array of pointers to them: the call releases the interpreter lock.

    Attributes:
        current: memory of the values, the address of the array, and the status that the machine code writes; together,
            since attributes of a thread are found slowly.
    """

    def __init__(self, plan: Plan, parameters: Sequence[str] = (), **constants: float | int) -> None:
        """Lays out the values.

        Args:
            plan: of the kernel; its sizes are filled in.
            parameters: what `launcher` writes, first in memory and in this order.
            constants: addresses and numbers that stay.
        """
        present = [operand for operand in plan.operands if operand.present]
        formats = {o.name: _FORMATS["pointer" if o.kind == "pointer" else o.dtype] for o in present}
        self._formats = formats | {"stream": _FORMATS["pointer"]}
        names = [*parameters, *(name for name in self._formats if name not in parameters)]
        self._places = {name: _SLOT * slot for slot, name in enumerate(names)}
        memory, status = (ctypes.c_char * (_SLOT * len(names)))(), ctypes.c_int32()
        base = ctypes.addressof(memory)
        addresses = [*(base + self._places[name] for name in self._formats), ctypes.addressof(status)]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self.current = memory, ctypes.addressof(self._pointers), status
        self.write(**{operand.name: operand.size for operand in present if operand.kind == "size"}, **constants)

    def write(self, **values: float | int) -> None:
        """Writes values by their names."""
        for name, value in values.items():
            struct.pack_into(self._formats[name], self.current[0], self._places[name], value)

    def arguments(self) -> dict[str, bytes]:
        """Every argument in the order of the host function's parameters, the stream last."""
        memory = bytes(self.current[0])
        return {name: memory[self._places[name] :][: struct.calcsize(form)] for name, form in self._formats.items()}

    def launcher(
        self, parameters: Sequence[str], call: Callable[[int], None], fail: Callable[[int], NoReturn]
    ) -> Callable[..., None]:
        """A function that writes its arguments, those of the frames' parameters, into this thread's frame and calls.

        Args:
            parameters: of the frames.
            call: takes the address of the array.
            fail: takes a status that is not 0.
        """
        padded = [f"{form[1:]}{_SLOT - struct.calcsize(form)}x" for form in map(self._formats.get, parameters)]
        write = struct.Struct("=" + "".join(padded)).pack_into

        def launch(values: Sequence[float | int]) -> None:
            memory, address, status = self.current
            write(memory, 0, *values)
            call(address)
            if status.value:
                fail(status.value)

        return launch
