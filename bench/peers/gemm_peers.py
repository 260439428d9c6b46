"""Peers of the dense GEMM: ours, cuBLAS through torch, the best of cuBLASLt's algorithms, torch.compile, quack."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch

import cute_kernels
from bench.configs import arch_of
from bench.gemm_cases import DTYPES, GemmCase, GemmData
from bench.peers import Candidate, PeerUnavailable, quack_configs
from bench.peers.cublaslt import CublasError, Matmul, Operand
from bench.timing import elapsed_ms, fastest
from cute_kernels.config import GemmConfig, GemmProblem
from cute_kernels.operations.compile import compile_plan
from cute_kernels.operations.gemm import GEMM
from cute_kernels.plan import make_plan


def compile_ahead(case: GemmCase, config: GemmConfig | None, device: torch.device) -> None:
    """Compiles the kernel of a case into the in-memory cache; a configuration that the plan refuses is left out."""
    arch = arch_of(torch.cuda.get_device_capability(device))
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    dtype = str(DTYPES[case.dtype]).removeprefix("torch.")
    problem = GemmProblem(case.m, case.n, case.k, in_dtype=dtype, out_dtype=dtype)
    with contextlib.suppress(ValueError):
        compile_plan(make_plan(problem, config, arch, sm_count=sm_count))


def build_ours(data: GemmData, config: GemmConfig | None = None) -> Candidate:
    """Our kernel; its output is allocated by every call, as a user's is."""
    detail = ""
    if config is None:
        detail = repr(GEMM.prepared(a=data.a[0], b=data.b, allow_tf32=True).plan.config)
    return Candidate(lambda slot: cute_kernels.gemm(data.a[slot], data.b, config=config, allow_tf32=True), detail)


def build_torch(data: GemmData) -> Candidate:
    """cuBLAS as `torch.nn.functional.linear` calls it."""
    torch.backends.cuda.matmul.allow_tf32 = True
    return Candidate(lambda slot: torch.nn.functional.linear(data.a[slot], data.b))


def build_compiled(data: GemmData) -> Candidate:
    """The same under `torch.compile`, which chooses among cuBLAS and Triton kernels by timing them.

    Without CUDA graphs: they would hide this peer's launches from the host and copy its inputs, which rotate, to fixed
    addresses; all peers are launched one by one.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.reset()
    compiled = torch.compile(
        torch.nn.functional.linear, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs"
    )
    return Candidate(lambda slot: compiled(data.a[slot], data.b), "max-autotune-no-cudagraphs")


def build_cublaslt(data: GemmData) -> Candidate:
    """The fastest of the algorithms that cuBLASLt's heuristic proposes."""
    case = data.case
    index = torch.cuda.current_device() if data.device.index is None else data.device.index
    matmul = Matmul(
        a=Operand(case.k, case.n, case.k, 0), b=Operand(case.k, case.m, case.k, 0),
        d=Operand(case.n, case.m, case.n, 0), batch=1, alpha=1.0, device=index, kind=case.dtype,
    )  # fmt: skip
    try:
        algorithms = matmul.algorithms(16)
    except CublasError as error:
        raise PeerUnavailable(str(error)) from error

    def launch(algorithm, slot: int) -> torch.Tensor:
        out = data.out[slot]
        matmul.run(algorithm, data.b.data_ptr(), data.a[slot].data_ptr(), out.data_ptr(), out.data_ptr())
        return out

    launches = {
        f"algorithm {index + 1} of {len(algorithms)}": functools.partial(launch, algorithm)
        for index, algorithm in enumerate(algorithms)
    }
    return _best(data, launches, CublasError)


def build_quack(data: GemmData) -> Candidate:
    """The fastest of quack's tiles, clusters and schedules for the architecture at hand."""
    if data.case.dtype != "bf16":
        raise PeerUnavailable("set up here for 16-bit operands only")
    _, configs = quack_configs.for_device(quack_configs.GEMM, data.device)
    import quack.gemm

    def launch(config: quack_configs.QuackConfig, slot: int) -> torch.Tensor:
        tile = (config.rows, config.columns, config.cluster_m, config.cluster_n)
        quack.gemm.gemm(data.a[slot][None], data.b[None], data.out[slot][None], None, None, *tile, **config.options)
        return data.out[slot]

    launches = {config.name: functools.partial(launch, config) for config in configs}
    return _best(data, launches, (RuntimeError, ValueError, TypeError, AssertionError))


def _best(data: GemmData, launches: dict[str, Callable[[int], torch.Tensor]], refusals) -> Candidate:
    usable, failures = {}, []
    for name, launch in launches.items():
        try:
            elapsed_ms(launch, 1, 1)
        except refusals as error:
            failures.append(f"{name}: {error}".splitlines()[0][:200])
        else:
            usable[name] = launch
    if not usable:
        raise PeerUnavailable("; ".join(failures) or "nothing proposed")
    best = fastest(usable, data.case.slots)
    return Candidate(usable[best], best)
