"""quack's SM90 GEMM (CuTe DSL), batched over positions with a row vector per batch, or flat without it."""

from __future__ import annotations

import functools

import torch

from bench.cases import CaseData
from bench.peers import Candidate, PeerUnavailable
from bench.timing import elapsed_ms, fastest

# (rows, columns, cluster along rows, cluster along columns, pingpong)
CONFIGS = (
    (128, 192, 2, 1, True),
    (128, 192, 1, 2, True),
    (128, 128, 2, 1, True),
    (256, 128, 2, 1, False),
    (256, 192, 1, 1, False),
)


@functools.cache
def _gemm():
    """quack's `gemm` with fast FP8 accumulation, which its front end has no argument for."""
    import quack.cache
    import quack.gemm

    class FastAccumulation(quack.gemm.GemmDefaultSm90):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, fp8_fast_accum=True, **kwargs)

    # quack's cache on disk does not know about this class.
    quack.cache.CACHE_ENABLED = False
    quack.gemm.GemmDefaultSm90 = FastAccumulation
    return quack.gemm.gemm


def build_position_major(data: CaseData) -> Candidate:
    """Batch = positions; bias + position is the FP32 row vector of a batch."""
    case = data.case

    def view(tensor: torch.Tensor, width: int) -> torch.Tensor:
        return tensor.view(case.images, case.positions, width).transpose(0, 1)

    return _build(
        data,
        [view(x, case.k) for x in data.x],
        data.weight.expand(case.positions, case.n, case.k),
        [view(out, case.n) for out in data.out],
        data.table,
    )


def build_gemm(data: CaseData) -> Candidate:
    """The product alone, flat."""
    return _build(data, [x[None] for x in data.x], data.weight[None], [out[None] for out in data.out], None)


def _build(data: CaseData, inputs, weight, outputs, vector: torch.Tensor | None) -> Candidate:
    if torch.cuda.get_device_capability(data.device) != (9, 0):
        raise PeerUnavailable("set up here for compute capability 9.0 only")
    gemm = _gemm()

    def launcher(config: tuple):
        rows, columns, cluster_m, cluster_n, pingpong = config

        def launch(slot: int) -> torch.Tensor:
            gemm(
                inputs[slot], weight, outputs[slot], None, None, rows, columns, cluster_m, cluster_n,
                pingpong=pingpong, persistent=True, rowvec_bias=vector, alpha=data.scale,
            )  # fmt: skip
            return data.out[slot]

        return launch

    candidates, failures = {}, []
    for config in CONFIGS:
        name = "{}x{}, cluster ({}, {}), {}".format(*config[:4], "pingpong" if config[4] else "cooperative")
        launch = launcher(config)
        try:
            elapsed_ms(launch, 1, 1)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            failures.append(f"{name}: {error}".splitlines()[0][:200])
        else:
            candidates[name] = launch
    if not candidates:
        raise PeerUnavailable("; ".join(failures))
    best = fastest(candidates, data.case.slots)
    return Candidate(candidates[best], best)
