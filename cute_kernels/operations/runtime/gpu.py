"""Plan + operands -> a launch on a GPU."""

import functools
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from cute_kernels.dsl import host_code
from cute_kernels.operations.compile import Artifact, Frames, compile_plan
from cute_kernels.operations.runtime.operands import Operands, picker
from cute_kernels.plan import Plan


def launch(plan: Plan, operands: Operands) -> None:
    """Enqueues the kernels of a plan on the current stream of their device and returns at once. Raises TypeError: an
    operand that the plan needs is missing; RuntimeError: the CUDA runtime refused the launch."""
    device = operands.device(plan)
    with torch.cuda.device(device):
        handle, given = torch.cuda.current_stream(device).cuda_stream, operands.addresses()
        for kernel in plan.launches:  # which takes what it knows
            bound_launch(kernel)(**given, stream=handle)


@functools.lru_cache(maxsize=1024)
def bound_launch(plan: Plan) -> "BoundLaunch":
    """The plan's kernel, compiled and loaded, ready to be launched on any device of its architecture."""
    return BoundLaunch(plan, compile_plan(plan))


class BoundLaunch:
    """A compiled host function with the sizes of one plan filled in."""

    def __init__(self, plan: Plan, artifact: Artifact) -> None:
        """Loads the kernel into every device. Raises RuntimeError: the CUDA runtime refused it."""
        self.plan = plan
        self._name = artifact.kernel_name
        self._function = artifact.function  # owns the machine code
        self._function.load()
        self._given = {operand.name for operand in plan.operands if operand.given} | {"stream"}
        self._frames = Frames(plan)
        self._launch = self._frames.launcher((), self._function.call, self._fail)

    def __call__(self, *, stream: int, **given: float | int | None) -> None:
        """Enqueues the kernel on a stream of the current device, a CUstream handle; ``given`` is as of
        `host_arguments`. Raises RuntimeError: the CUDA runtime refused the launch."""
        self._frames.write(**{name: value for name, value in given.items() if name in self._given}, stream=stream)
        self._launch(())

    def with_constants(
        self, parameters: Sequence[str], **constants: float | int | None
    ) -> Callable[[Sequence[float | int | None]], None]:
        """The launch as a function of the values of ``parameters`` only, in their order: the shortest way for calls
        that repeat. What the plan does without is taken and ignored.

        ``constants``: everything else, ``stream`` among it, likewise; what they point to has to live as long as the
        result.
        """
        pick = picker([place for place, name in enumerate(parameters) if name in self._given])
        own = pick(parameters)
        fixed = {name: value for name, value in constants.items() if name in self._given}
        launch = Frames(self.plan, own, **fixed).launcher(own, self._function.call, self._fail)
        if len(own) == len(parameters):
            return launch
        return lambda values: launch(pick(values))

    def _fail(self, status: int) -> NoReturn:
        host_code.fail(f"launch of {self._name}", status)
