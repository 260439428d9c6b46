"""The operations on DTensor, by several processes, compared with the same calls on whole tensors.

    python -m tests.operations.sharded_calls RANK WORLD STORE OUTPUT BACKEND

Each process runs all `CASES` in the same order; rank 0 writes what became of each to OUTPUT, as JSON by name. The data
are small integers wherever they are multiplied, so that sums are exact on every device and results equal bit for bit.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module

import cute_kernels
from cute_kernels.operations.patch_weight import PatchWeight
from tests.processes import run_python

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
Tensors = dict[str, torch.Tensor | PatchWeight]


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        function: of `cute_kernels`.
        shapes: of the tensors that it gets, by argument.
        shards: dimension of each argument that is sharded; the others are replicated.
        out: dimension of the result that is sharded, None for replicas.
        options: more arguments.
        transform: of the DTensors, after they were sharded.
        compiled: through torch.compile.
        precision: of a prepared weight.
        mesh: its shape; shards are along its first dimension.
        kind: element type of a product's operands.
        exchanges: arguments are redistributed between processes, which gloo does not do for FP8.
    """

    function: Callable[..., torch.Tensor]
    shapes: dict[str, tuple[int, ...]]
    shards: dict[str, int] = field(default_factory=dict)
    out: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    transform: Callable[[dict[str, DTensor], DeviceMesh], dict[str, DTensor]] = lambda tensors, mesh: tensors
    compiled: bool = False
    precision: str = ""
    mesh: tuple[int, ...] = (2,)
    kind: torch.dtype = BF16
    exchanges: bool = False


def embed(x: tuple[int, ...], positions: int = 0, index: bool = False, n: int = 32, bias: bool = True, **more) -> Case:
    """A patch embed with K = 32."""
    shapes = {"x": (*x, 32), "weight": (n, 32)} | ({"bias": (n,)} if bias else {})
    shapes |= ({"pos_embed": (positions, n)} if positions else {}) | ({"pos_index": x} if index else {})
    return Case(cute_kernels.patch_embed, shapes, options={"scale_a": 0.25, **more.pop("options", {})}, **more)


def embed_images(
    images: tuple[int, ...], positions: int = 0, n: int = 32, precision: str = "int8", patch: int = 8, **more
) -> Case:
    """A patch embed of images whose patches are ``patch`` x ``patch`` pixels."""
    shapes = {"images": images, "weight": (n, images[1], patch, patch), "bias": (n,)}
    shapes |= {"pos_embed": (positions, n)} if positions else {}
    return Case(cute_kernels.patch_embed_images, shapes, precision=precision, **more)


def product(a: tuple[int, ...], b: tuple[int, ...], bias: bool = True, **more) -> Case:
    """A dense GEMM in BF16."""
    return Case(cute_kernels.gemm, {"a": a, "b": b} | ({"bias": (b[-2],)} if bias else {}), **more)


def narrow_product(a: tuple[int, ...], b: tuple[int, ...], **more) -> Case:
    """A dense GEMM of FP8 with everything that an epilogue may multiply and add."""
    batch = b[:-2]
    shapes = {"a": a, "b": b, "bias": (b[-2],), "scale_a": (*a[:-1], 1), "scale_b": (*batch, 1, b[-2])}
    return Case(cute_kernels.gemm, shapes | {"residual": (*a[:-1], b[-2])}, kind=FP8, **more)


def scales_in_memory(tensors: dict[str, DTensor], mesh: DeviceMesh) -> dict[str, DTensor]:
    """The factors of `HALVES` as replicated tensors."""
    one = torch.full((1,), 0.5, device=mesh.device_type)
    return tensors | {name: DTensor.from_local(one, mesh, [Replicate()]) for name in HALVES}


def second_scale_in_memory(tensors: dict[str, DTensor], mesh: DeviceMesh) -> dict[str, DTensor]:
    """As a call with the first one, but for where the tensor stands among the arguments."""
    return {name: t for name, t in scales_in_memory(tensors, mesh).items() if name != "scale_a"}


def first_scale_in_memory(tensors: dict[str, DTensor], mesh: DeviceMesh) -> dict[str, DTensor]:
    return {name: t for name, t in scales_in_memory(tensors, mesh).items() if name != "scale_b"}


def scale_per_row(tensors: dict[str, DTensor], mesh: DeviceMesh) -> dict[str, DTensor]:
    """``scale_a`` as ``[B, S, 1]``, sharded as the rows are."""
    x = tensors["x"]
    return tensors | {"scale_a": _multipliers((*x.shape[:-1], 1), mesh, x.placements)}


def scale_per_row_and_feature(tensors: dict[str, DTensor], mesh: DeviceMesh) -> dict[str, DTensor]:
    """``scale_a`` as ``[B * S, 1]`` and ``scale_b`` as ``[1, N]``, replicated: the operator divides them."""
    rows, n = tensors["x"].shape[:-1].numel(), tensors["weight"].shape[0]
    whole = [Replicate()] * mesh.ndim
    return tensors | {"scale_a": _multipliers((rows, 1), mesh, whole), "scale_b": _multipliers((1, n), mesh, whole)}


def _multipliers(shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """1, 2, .. eighths."""
    values = torch.arange(1, math.prod(shape) + 1, device=mesh.device_type).view(shape) / 8
    return DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(mesh, placements)


HALVES = ("scale_a", "scale_b")


def partial_sums(tensors: dict[str, DTensor], mesh: DeviceMesh) -> dict[str, DTensor]:
    """``a`` as a sum that the processes have not added yet: all of it in the first one."""
    whole = tensors["a"].to_local() * (mesh.get_rank() == 0)
    return tensors | {"a": DTensor.from_local(whole, mesh, [Partial()])}


CASES: dict[str, Case] = {
    "replicas": embed((4, 6), 6),
    "images": embed((4, 6), 6, shards={"x": 0}, out=0),
    "images of which one process has more": embed((3, 6), 6, shards={"x": 0}, out=0),
    "images without addends": embed((4, 6), bias=False, shards={"x": 0}, out=0),
    "images on a mesh of two dimensions": embed((4, 6), 6, shards={"x": 0}, out=0, mesh=(2, 1)),
    "positions": embed((4, 6), 6, shards={"x": 1, "pos_embed": 0}, out=1),
    "positions, the embedding replicated": embed((4, 6), 6, shards={"x": 1}, out=1),
    "features": embed((4, 6), 6, shards={"weight": 0, "bias": 0, "pos_embed": 1}, out=2),
    "features, addends replicated": embed((4, 6), 6, shards={"weight": 0}, out=2),
    "features on a mesh of two dimensions": embed((4, 6), 6, shards={"weight": 0}, out=2, mesh=(2, 1)),
    "features of rows with positions": embed((24,), 6, shards={"weight": 0, "pos_embed": 1}, out=2),
    "features of rows": embed((24,), shards={"weight": 0}, out=1),
    "features of rows that name their position": embed((10,), 6, True, shards={"weight": 0}, out=1),
    "features that divide into no multiples of 8": embed((4, 6), 6, n=24, shards={"weight": 0}, exchanges=True),
    "rows of whole images": embed((24,), 6, shards={"x": 0}, out=0),
    "rows of parts of images": embed((18,), 6, shards={"x": 0}, exchanges=True),
    "rows without positions": embed((10,), shards={"x": 0}, out=0),
    "rows that name their position": embed((10,), 6, True, shards={"x": 0, "pos_index": 0}, out=0),
    "rows that name their position, the index replicated": embed((10,), 6, True, shards={"x": 0}, out=0),
    "padded rows that name their position": embed((4, 5), 6, True, shards={"x": 0, "pos_index": 0}, out=0),
    "places of padded rows": embed((3, 6), 6, True, shards={"x": 1, "pos_index": 1}, out=1),
    "scales in memory": embed(
        (4, 6), 6, shards={"x": 0}, out=0, options={"scale_a": 0.5, "scale_b": 0.5}, transform=scales_in_memory
    ),
    "first scale in memory": embed(
        (4, 6), 6, shards={"weight": 0}, out=2, options={"scale_a": 0.5}, transform=first_scale_in_memory
    ),
    "second scale in memory": embed(
        (4, 6), 6, shards={"weight": 0}, out=2, options={"scale_a": None, "scale_b": 0.5},
        transform=second_scale_in_memory,
    ),
    "scale per row, images": embed((4, 6), 6, shards={"x": 0}, out=0, transform=scale_per_row),
    "scale per row, positions": embed((4, 6), 6, shards={"x": 1}, out=1, transform=scale_per_row),
    "scale per row and feature, images": embed(
        (4, 6), 6, shards={"x": 0}, out=0, transform=scale_per_row_and_feature
    ),
    "scale per row and feature, features": embed(
        (4, 6), 6, shards={"weight": 0}, out=2, transform=scale_per_row_and_feature
    ),
    "another rounding": embed((4, 6), 6, shards={"x": 0}, out=0, options={"config": "bf16x2"}),
    "inner extent of FP8": embed((4, 6), 6, shards={"x": 2, "weight": 1}, exchanges=True),
    "images, compiled": embed((4, 6), 6, shards={"x": 0}, out=0, compiled=True),
    "features, compiled": embed((4, 6), 6, shards={"weight": 0}, out=2, compiled=True),
    "pixels, replicas": embed_images((2, 3, 16, 16), 4),
    "pixels of images": embed_images((4, 3, 16, 24), 6, shards={"images": 0}, out=0),
    "pixels of one image for two": embed_images((1, 3, 16, 24), 6, shards={"images": 0}, exchanges=True),
    "pixels of images on a mesh of two dimensions": embed_images(
        (3, 3, 16, 16), 4, shards={"images": 0}, out=0, mesh=(2, 1)
    ),
    "pixels of rows of patches": embed_images((2, 3, 32, 16), 8, shards={"images": 2, "pos_embed": 0}, out=1),
    "pixels of rows of patches, positions replicated": embed_images((2, 3, 32, 16), 8, shards={"images": 2}, out=1),
    "pixels of half patches": embed_images((2, 3, 24, 16), 6, shards={"images": 2}, exchanges=True),
    "pixels of columns": embed_images((2, 3, 16, 32), 8, shards={"images": 3}, exchanges=True),
    "pixels' features": embed_images((2, 3, 16, 16), 4, shards={"weight": 0, "bias": 0, "pos_embed": 1}, out=2),
    "pixels' features, addends replicated": embed_images((2, 3, 16, 16), 4, shards={"weight": 0}, out=2),
    "pixels' features without positions": embed_images((2, 3, 16, 16), shards={"weight": 0}, out=2),
    "pixels' features that divide into no multiples of 8": embed_images(
        (2, 3, 16, 16), 4, n=24, shards={"weight": 0}, exchanges=True
    ),
    "pixels, floating-point weights": embed_images(
        (2, 1, 32, 32), 4, precision="fp16", patch=16, shards={"weight": 0}, out=2
    ),
    "normalised pixels": embed_images((4, 3, 16, 16), 4, precision="bf16", shards={"images": 0}, out=0),
    "normalised pixels' features": embed_images((2, 3, 16, 16), 4, precision="bf16", shards={"weight": 0}, out=2),
    "pixels of images, compiled": embed_images((4, 3, 16, 16), 4, shards={"images": 0}, out=0, compiled=True),
    "gemm, replicas": product((20, 16), (24, 16)),
    "gemm, rows of a": product((20, 16), (24, 16), shards={"a": 0}, out=0),
    "gemm, rows of b": product((20, 16), (24, 16), shards={"b": 0, "bias": 0}, out=1),
    "gemm, rows of b, the bias replicated": product((20, 16), (24, 16), shards={"b": 0}, out=1),
    "gemm, an odd number of rows of b for each": product((20, 16), (22, 16), shards={"b": 0}, out=1),
    "gemm, as FP32": product((20, 16), (24, 16), shards={"a": 0}, out=0, options={"out_dtype": torch.float32}),
    "gemm, as FP16": product((20, 16), (24, 16), shards={"a": 0}, out=0, options={"out_dtype": torch.float16}),
    "gemm, as BF16 again": product((20, 16), (24, 16), shards={"a": 0}, out=0),
    "gemm, an activation": product((20, 16), (24, 16), shards={"a": 0}, out=0, options={"activation": "silu"}),
    "gemm, batches, one b": product((4, 10, 16), (24, 16), shards={"a": 0}, out=0),
    "gemm, rows of batches, one b": product((3, 10, 16), (24, 16), shards={"a": 1}, out=1),
    "gemm, rows of one b for batches": product((3, 10, 16), (24, 16), shards={"b": 0, "bias": 0}, out=2),
    "gemm, batches": product((4, 10, 16), (4, 24, 16), shards={"a": 0, "b": 0}, out=0),
    "gemm, rows of batches": product((3, 10, 16), (3, 24, 16), shards={"a": 1}, out=1),
    "gemm, rows of b of batches": product((3, 10, 16), (3, 24, 16), shards={"b": 1, "bias": 0}, out=2),
    "gemm, inner extent": product((20, 16), (24, 16), shards={"a": 1, "b": 1}, out=None),
    "gemm, partial sums": product((20, 16), (24, 16), transform=partial_sums),
    "gemm of FP8, rows of a": narrow_product(
        (20, 16), (24, 16), shards={"a": 0, "scale_a": 0, "residual": 0}, out=0
    ),
    "gemm of FP8, rows of a, all else replicated": narrow_product((20, 16), (24, 16), shards={"a": 0}, out=0),
    "gemm of FP8, rows of b": narrow_product(
        (20, 16), (24, 16), shards={"b": 0, "bias": 0, "scale_b": 1, "residual": 1}, out=1
    ),
    "gemm of FP8, batches": narrow_product((4, 10, 16), (4, 24, 16), shards={"a": 0, "b": 0}, out=0),
    "gemm of FP8, rows of b of batches": narrow_product((3, 10, 16), (3, 24, 16), shards={"b": 1}, out=2),
    "gemm, rows of a, compiled": product((20, 16), (24, 16), shards={"a": 0}, out=0, compiled=True),
}


def draw(case: Case, device: str) -> Tensors:
    """Whole arguments, the same in every process."""
    generator = torch.Generator().manual_seed(len(case.shapes) + sum(map(sum, case.shapes.values())))
    kinds = {"x": FP8, "weight": FP8, "a": case.kind, "b": case.kind}
    tensors = {}
    for name, shape in case.shapes.items():
        if case.precision and name == "weight":
            value = cute_kernels.prepare_patch_weight(
                torch.randint(-3, 4, shape, generator=generator).float(), precision=case.precision, channels=shape[1]
            )
        elif name == "images":
            value = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            value = value.to(BF16) if case.precision == "bf16" else value
        elif name in kinds:
            value = torch.randint(-3, 4, shape, generator=generator).to(kinds[name])
        elif name == "pos_index":
            value = torch.randint(0, case.shapes["pos_embed"][0], shape, generator=generator, dtype=torch.int32)
        else:
            value = torch.randn(shape, generator=generator)
        tensors[name] = value.to(device)
    return tensors


def sharded(tensor: torch.Tensor | PatchWeight, along: int | None, mesh: DeviceMesh) -> DTensor | PatchWeight:
    """As `distribute_tensor` makes it, without communication; of a prepared weight, all its buffers."""
    if isinstance(tensor, PatchWeight):

        def divide(_: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, sharded(buffer, along, mesh))

        return distribute_module(copy.deepcopy(tensor), mesh, divide)
    rest: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    if along is None:
        return DTensor.from_local(tensor, mesh, [Replicate(), *rest], run_check=False)
    parts, rank = tensor.chunk(mesh.size(0), along), mesh.get_local_rank(0)
    part = (parts[rank] if rank < len(parts) else tensor.narrow(along, 0, 0)).contiguous()
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(part, mesh, [Shard(along), *rest], run_check=False, shape=shape, stride=stride)


def options_of(case: Case, device: str) -> dict[str, Any]:
    """Further arguments; a configuration is one for the device, with this epilogue."""
    options = dict(case.options)
    if "config" in options:
        hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
        kind = cute_kernels.Sm90PatchEmbedConfig if hopper else cute_kernels.Sm100PatchEmbedConfig
        options["config"] = kind(epilogue=options["config"])
    return options


@functools.cache
def mesh_of(device: str, shape: tuple[int, ...]) -> DeviceMesh:
    """One for all cases, as in a program: DTensor remembers its decisions by mesh."""
    return init_device_mesh(device, shape)


def run(case: Case, device: str) -> dict[str, Any]:
    """What became of a case."""
    mesh = mesh_of(device, case.mesh)
    whole = draw(case, device)
    options = options_of(case, device)
    tensors = case.transform({name: sharded(t, case.shards.get(name), mesh) for name, t in whole.items()}, mesh)
    scales = {name: tensor.full_tensor() for name, tensor in tensors.items() if name not in whole}
    expected = case.function(**whole, **(options | scales))

    def call(tensors: dict[str, DTensor]) -> DTensor:
        return case.function(**tensors, **{name: v for name, v in options.items() if name not in tensors})

    if case.compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    try:
        out = call(tensors)
        full = out.full_tensor()
    except RuntimeError as error:
        return {"error": str(error)[:500]}
    return {
        "placements": [placement.dim if isinstance(placement, Shard) else None for placement in out.placements],
        # The type that DTensor propagates to the next operator; `out.dtype` is that of the local tensor.
        "type": [list(out.shape), str(out._spec.tensor_meta.dtype)],
        "expected type": [list(expected.shape), str(expected.dtype)],
        "local": list(out.to_local().shape),
        "equal": full.dtype == expected.dtype and torch.equal(full, expected),
    }


def in_two_processes(backend: str, folder: Path, seconds: float) -> dict[str, dict[str, Any]]:
    """Runs all cases.

    Args:
        backend: "gloo" on the CPU, "nccl" on two GPUs.
        folder: for what the processes share.
        seconds: after which they are ended.

    Raises:
        AssertionError: a process failed; with what it said.
        subprocess.TimeoutExpired: one did not end in time.
    """
    output = folder / "results.json"
    root = Path(__file__).resolve().parents[2]
    program = functools.partial(run_python, "-m", "tests.operations.sharded_calls", cwd=root, timeout=seconds)
    with ThreadPoolExecutor(2) as threads:
        started = [
            threads.submit(program, str(rank), "2", str(folder / "store"), str(output), backend) for rank in range(2)
        ]
        done = [process.result() for process in started]
    assert all(process.returncode == 0 for process in done), "\n".join(process.stderr[-3000:] for process in done)
    return json.loads(output.read_text())


def main(rank: str, world: str, store: str, output: str, backend: str) -> None:
    device = "cpu" if backend == "gloo" else "cuda"
    if device == "cuda":
        torch.cuda.set_device(int(rank))
    dist.init_process_group(backend, init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    found = {name: run(case, device) for name, case in CASES.items()}
    dist.barrier()
    dist.destroy_process_group()
    if rank == "0":
        Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
