"""Argument frames: what the machine code of a host function is called with, by the table of a plan's operands.

CuTe DSL's own call converts and checks its Python objects one by one, which takes longer than the launch. The machine
code underneath takes an array of pointers, one to each argument, and a last one to the status it returns. A frame keeps
both, and a launch writes the addresses that differ.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

from cute_kernels.plan import Operand, Plan

_NUMBERS = {"float32": ctypes.c_float, "int32": ctypes.c_int32}
"""C types of numbers that are passed by value."""


class Frames(threading.local):
    """Argument values of one thread, and the array of pointers to them: the call releases the interpreter lock.

    ``current`` holds the values and the address of the array together, since attributes of a thread are found slowly;
    a number is converted faster than the array itself.
    """

    def __init__(self, plan: Plan, **constants: float | int) -> None:
        kind = values_type(tuple((o.name, _c_type(o)) for o in plan.operands if o.present))
        sizes = {operand.name: operand.size for operand in plan.operands if operand.kind == "size"}
        values = kind(**sizes, **constants)
        base = ctypes.addressof(values)
        addresses = [base + getattr(kind, name).offset for name, _ in kind._fields_]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self.current = values, ctypes.addressof(self._pointers)


def _c_type(operand: Operand) -> type:
    return ctypes.c_void_p if operand.kind == "pointer" else _NUMBERS[operand.dtype]


@functools.cache
def values_type(parameters: tuple[tuple[str, type], ...]) -> type[ctypes.Structure]:
    """Arguments in the order of the host function's parameters, then the stream and the status."""
    fields = [*parameters, ("stream", ctypes.c_void_p), ("status", ctypes.c_int32)]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def launcher(parameters: tuple[str, ...], written: tuple[str, ...]) -> Callable[..., Callable[..., None]]:
    """A function ``make(frames, call, fail)`` that returns a launch, a function of ``parameters``.

    A launch writes those of its parameters that are in ``written`` into this thread's frame and calls. It is generated,
    as `dataclasses` does it, since a warm call takes less than 10 us of Python and a loop over names would be a large
    part of that. For ``("x", "out")`` it reads:

        def launch(x, out):
            values, address = frames.current
            values.x = x
            values.out = out
            call(address)
            if values.status:
                fail(values.status)
    """
    lines = [
        "def make(frames, call, fail):",
        f"    def launch({', '.join(parameters)}):",
        "        values, address = frames.current",
        *(f"        values.{name} = {name}" for name in parameters if name in written),
        "        call(address)",
        "        if values.status:",
        "            fail(values.status)",
        "    return launch",
    ]
    namespace: dict[str, Any] = {}
    exec("\n".join(lines), namespace)  # noqa: S102
    return namespace["make"]
