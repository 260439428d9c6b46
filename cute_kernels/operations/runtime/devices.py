"""Facts of a CUDA device that planning needs, and the configuration that was found fastest on it."""

import functools
import sys

import torch

from cute_kernels.config import Config
from cute_kernels.operations.runtime import tuned
from cute_kernels.plan import arch_of


def is_emulated() -> bool:
    """Whether the CUDA device is the emulated one of a program that runs in the emulator."""
    module = sys.modules.get("cute_kernels.emulator.programs.device.cuda_device")
    return module is not None and module.is_active()


def device_facts(index: int) -> tuple[str, int]:
    """Architecture and multiprocessors of a CUDA device that has a kernel."""
    return _facts.__wrapped__(index) if is_emulated() else _facts(index)  # each program has a device of its own


@functools.cache
def _facts(index: int) -> tuple[str, int]:
    architecture = arch_of(torch.cuda.get_device_capability(index))
    return architecture, torch.cuda.get_device_properties(index).multi_processor_count


def kind_of(index: int) -> tuned.Device:
    """Kind of a CUDA device, which measurements on it hold for."""
    return tuned.Device(torch.cuda.get_device_name(index), *device_facts(index))


def tuned_config(problem: tuned.Problem, device: torch.device) -> Config | None:
    """The configuration that was found fastest on CUDA devices of this kind, or None."""
    return tuned.lookup(problem, kind_of(torch.cuda.current_device() if device.index is None else device.index))
