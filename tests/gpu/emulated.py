"""A device that is not there: the operations on "cuda" tensors, executed by the emulator.

`cute_kernels.emulator.programs.capturing` serves the tensors and answers what torch asks of a device. What is added
here leads the operations' own way to a GPU (checks, plan, table, warm calls, argument frames by name) up to the last
step, where a launch in the emulator takes the place of one by the driver.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch

from cute_kernels.emulator.programs import capturing
from cute_kernels.operations import gemm, patch_embed, patch_embed_images
from cute_kernels.operations.compile import compile_plan, host_arguments
from cute_kernels.operations.runtime import devices, gpu, repeat
from cute_kernels.plan import Plan


class EmulatedLaunch:
    """A plan's kernel, with the interface of `cute_kernels.operations.runtime.gpu.BoundLaunch`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._function = compile_plan(plan, emulated=True).function
        self._given = {operand.name for operand in plan.operands if operand.given}

    def __call__(self, *, stream: int, **given: float | int | None) -> None:
        """Executes the kernel at once."""
        given = {name: value for name, value in given.items() if name in self._given}
        self._function(*host_arguments(self.plan, stream=stream, **given))

    def with_constants(self, parameters: Sequence[str], **constants: float | int | None) -> Callable[..., None]:
        """The launch as a function of ``parameters``."""

        def launch(values: Sequence[float | int | None]) -> None:
            self(**constants, **dict(zip(parameters, values, strict=True)))

        return launch


@contextlib.contextmanager
def device(arch: str) -> Iterator[capturing.Session]:
    """Puts one emulated device of an architecture in the place of all GPUs.

    Args:
        arch: a key of `cute_kernels.plan.ARCHS`.
    """
    with contextlib.ExitStack() as stack, capturing.capture(arch) as session:

        def replace(target: object, **values: object) -> None:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(target, name, value, create=True))

        replace(devices, is_emulated=lambda: False)  # the way to a GPU is what is tried
        replace(gpu, bound_launch=functools.lru_cache(maxsize=None)(EmulatedLaunch))
        given = {"_current_stream": "_cuda_getCurrentRawStream", "_current_device": "_cuda_getDevice"}
        given["_is_capturing"] = "_cuda_isCurrentStreamCapturing"
        replace(repeat, **{name: getattr(torch._C, function) for name, function in given.items()})
        replace(repeat, _empty_strided=repeat._empty_strided_on_device)
        for operation in (patch_embed.PATCH_EMBED, gemm.GEMM, patch_embed_images.PATCH_EMBED_IMAGES):
            for forget in (operation.repeated.clear, devices._facts.cache_clear):
                forget()
                stack.callback(forget)
        yield session
