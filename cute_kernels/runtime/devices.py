"""Choice of what executes a call, and what a plan has to know of a CUDA device."""

from __future__ import annotations

import functools
from typing import Literal, get_args

import torch

from cute_kernels.config import Config
from cute_kernels.plan import arch_of
from cute_kernels.runtime import tuned

Backend = Literal["auto", "emulator", "reference"]

_SUPPORTED = (
    "supported: CUDA devices of compute capability 8.0 to 9.0, 10.0 (B200, GB200) and 12.x, CPU tensors (plain torch, "
    'or the PTX emulator with backend="emulator"), and any torch device with backend="reference"'
)


def check_backend(backend: str) -> None:
    """Raises ValueError for an unknown one."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend = {backend!r}, allowed: {', '.join(map(repr, get_args(Backend)))}")


def choose_backend(device: torch.device, backend: str) -> Literal["kernel", "emulator", "reference"]:
    """Chooses what executes a call whose tensors are on ``device``.

    Raises:
        ValueError: unknown backend, or the emulator asked to read device memory.
        NotImplementedError: no kernel for this device.
    """
    check_backend(backend)
    if backend == "reference":
        return "reference"
    if backend == "emulator":
        if device.type != "cpu":
            raise ValueError(f'backend = "emulator" with tensors on {device}: the emulator reads CPU tensors')
        return "emulator"
    if device.type == "cpu":
        return "reference"
    if device.type != "cuda" or torch.version.hip is not None:
        raise NotImplementedError(f"no kernel for device {device}; {_SUPPORTED}")
    if arch_of(torch.cuda.get_device_capability(device)) is None:
        major, minor = torch.cuda.get_device_capability(device)
        raise NotImplementedError(
            f"no kernel for {torch.cuda.get_device_name(device)} (compute capability {major}.{minor}); {_SUPPORTED}"
        )
    return "kernel"


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
