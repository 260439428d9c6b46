"""Facts of a CUDA device that planning needs, and the configuration that was found fastest on it."""

from __future__ import annotations

import functools

import torch

from cute_kernels.config import Config
from cute_kernels.operations.runtime import tuned
from cute_kernels.plan import arch_of


@functools.cache
def device_facts(index: int) -> tuple[str, int]:
    """Architecture and multiprocessors of a CUDA device that has a kernel."""
    architecture = arch_of(torch.cuda.get_device_capability(index))
    return architecture, torch.cuda.get_device_properties(index).multi_processor_count


def kind_of(index: int) -> tuned.Device:
    """Kind of a CUDA device, which measurements on it hold for."""
    return tuned.Device(torch.cuda.get_device_name(index), *device_facts(index))


def tuned_config(problem: tuned.Problem, device: torch.device) -> Config | None:
    """The configuration that was found fastest on CUDA devices of this kind, or None."""
    return tuned.lookup(problem, kind_of(torch.cuda.current_device() if device.index is None else device.index))
