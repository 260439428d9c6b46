"""A persistent Triton kernel with TMA descriptors, flat rows or position-major tiles, table added in the epilogue."""

from __future__ import annotations

import importlib.util

import torch

from bench.cases import CaseData
from bench.peers import Candidate, PeerUnavailable
from bench.timing import elapsed_ms, fastest

# (rows, columns, K, stages, warps, halves of the epilogue)
CONFIGS = (
    (128, 256, 128, 3, 8, 1),
    (128, 256, 128, 4, 8, 2),
    (128, 128, 128, 4, 8, 1),
    (128, 128, 128, 5, 4, 1),
    (64, 256, 128, 4, 4, 2),
    (64, 128, 128, 5, 4, 1),
    (256, 128, 128, 3, 8, 1),
    (256, 128, 128, 4, 8, 2),
)


def build_position_major(data: CaseData) -> Candidate:
    """A tile is images at one position: one FP32 vector of bias + position per tile."""
    return _build(data, position_major=True)


def build_flat(data: CaseData) -> Candidate:
    """A tile is consecutive rows: the BF16 table is read per element."""
    return _build(data, position_major=False)


def _build(data: CaseData, position_major: bool) -> Candidate:
    if importlib.util.find_spec("triton") is None:
        raise PeerUnavailable("not installed: triton")
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    candidates, failures = {}, []
    for config in CONFIGS:
        if data.case.n % config[1]:
            continue
        name = "{}x{}x{}, {} stages, {} warps, {} stores".format(*config)
        launch = _launcher(data, config, position_major)
        try:
            elapsed_ms(launch, 1, 1)
        except (OutOfResources, CompilationError) as error:
            failures.append(f"{name}: {type(error).__name__}")
        else:
            candidates[name] = launch
    if not candidates:
        raise PeerUnavailable(f"no configuration runs N = {data.case.n}: {'; '.join(failures) or 'none divides N'}")
    best = fastest(candidates, data.case.slots)
    return Candidate(candidates[best], best)


def _launcher(data: CaseData, config: tuple[int, ...], position_major: bool):
    from triton.tools.tensor_descriptor import TensorDescriptor

    from bench.peers import triton_kernel  # needs Triton

    case = data.case
    rows_per_tile, columns, block_k, stages, warps, halves = config
    group = case.positions if position_major else 1
    # Position-major: an image is one row of S * K values, and a position is an offset within it. A K block that runs
    # past the end of a position meets zero weights, since the weight descriptor ends at K.
    rows = case.rows // group

    def descriptor(tensor: torch.Tensor, width: int, block: list[int]) -> TensorDescriptor:
        height = tensor.numel() // width
        return TensorDescriptor(tensor, [height, width], [width, 1], block)

    weight = descriptor(data.weight, case.k, [columns, block_k])
    inputs = [descriptor(x, group * case.k, [rows_per_tile, block_k]) for x in data.x]
    outputs = [descriptor(out, group * case.n, [rows_per_tile, columns // halves]) for out in data.out]
    table = data.table if position_major else data.table_bf16
    tiles = -(-rows // rows_per_tile) * group * (case.n // columns)
    programs = min(tiles, torch.cuda.get_device_properties(data.device).multi_processor_count)
    kernel = triton_kernel.patch_embed_kernel[(programs,)]
    sizes = (data.scale, rows, case.positions, case.n, case.k)

    def launch(slot: int) -> torch.Tensor:
        kernel(
            inputs[slot], weight, outputs[slot], table, *sizes,
            POSITION_MAJOR=position_major, ROWS=rows_per_tile, COLUMNS=columns, BLOCK_K=block_k, HALVES=halves,
            num_stages=stages, num_warps=warps,
        )  # fmt: skip
        return data.out[slot]

    return launch
