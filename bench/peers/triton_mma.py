"""A Triton GEMM by ``mma.sync``: what Triton emits before sm_90, and on sm_90 where it is told to."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator

import torch

from bench.gemm_cases import GemmData
from bench.peers import Candidate, PeerUnavailable
from bench.timing import elapsed_ms, fastest

CONFIGS = ((128, 128, 32, 3, 4), (128, 128, 32, 4, 8), (128, 256, 32, 3, 8), (256, 128, 32, 3, 8), (64, 64, 32, 4, 4))
"""Rows, columns and K of a tile, stages, warps; K of 16-bit types is twice as long."""

GROUP = 8
"""Rows of tiles that are taken together."""


@contextlib.contextmanager
def compiled_for_ampere() -> Iterator[None]:
    """On sm_90, Triton compiles for sm_80 and the assembler for the device: the products are ``mma.sync``."""
    from triton.backends.nvidia.compiler import CUDABackend

    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        yield
        return
    make_cubin = CUDABackend.make_cubin

    def assembled_for_the_device(self, source, metadata, options, _capability):
        return make_cubin(self, source, metadata, options, 10 * capability[0] + capability[1])

    previous = os.environ.get("TRITON_OVERRIDE_ARCH")
    os.environ["TRITON_OVERRIDE_ARCH"] = "sm80"
    CUDABackend.make_cubin = assembled_for_the_device
    try:
        yield
    finally:
        CUDABackend.make_cubin = make_cubin
        os.environ.pop("TRITON_OVERRIDE_ARCH")
        if previous is not None:
            os.environ["TRITON_OVERRIDE_ARCH"] = previous


def build(data: GemmData) -> Candidate:
    """The fastest of the tiles; FP32 is cut to TF32.

    Raises:
        PeerUnavailable: Triton is not installed, or none of the tiles runs.
    """
    if importlib.util.find_spec("triton") is None:
        raise PeerUnavailable("not installed: triton")
    from bench.peers import triton_mma_kernel  # needs Triton

    case, wider = data.case, 1 if data.a[0].dtype is torch.float32 else 2

    def launch(config: tuple[int, ...], slot: int) -> torch.Tensor:
        rows, columns, block_k, stages, warps = config
        grid = (-(-case.m // rows) * -(-case.n // columns),)
        triton_mma_kernel.product[grid](
            data.a[slot], data.b, data.out[slot], case.m, case.n, case.k,
            ROWS=rows, COLUMNS=columns, BLOCK_K=block_k * wider, GROUP=GROUP, num_stages=stages, num_warps=warps,
        )  # fmt: skip
        return data.out[slot]

    usable, failures = {}, []
    with compiled_for_ampere():
        for config in CONFIGS:
            name = "{}x{}x{}, {} stages, {} warps".format(*config)
            try:
                elapsed_ms(functools.partial(launch, config), 1, 1)
            except Exception as error:  # Triton's refusals have many classes, and the others still count
                failures.append(f"{name}: {type(error).__name__}")
            else:
                usable[name] = functools.partial(launch, config)
        if not usable:
            raise PeerUnavailable("; ".join(failures))
        best = fastest(usable, case.slots)
    return Candidate(usable[best], best)
