"""quack's GEMM (CuTe DSL), batched over positions with a row vector per batch, or flat without it."""

from __future__ import annotations

import functools

import torch

from bench.cases import CaseData
from bench.peers import Candidate, PeerUnavailable, quack_configs
from bench.timing import elapsed_ms, fastest


@functools.cache
def _gemm(arch: str):
    """quack's `gemm`; on SM90 with fast FP8 accumulation, which its front end has no argument for.

    SM100 has one kind of FP8 accumulation only.
    """
    import quack.gemm

    if arch == "sm_90a":
        import quack.cache

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
    arch, configs = quack_configs.for_device(quack_configs.PATCH_EMBED, data.device)
    gemm = _gemm(arch)

    def launcher(config: quack_configs.QuackConfig):
        tile = (config.rows, config.columns, config.cluster_m, config.cluster_n)

        def launch(slot: int) -> torch.Tensor:
            gemm(
                inputs[slot], weight, outputs[slot], None, None, *tile, rowvec_bias=vector, alpha=data.scale,
                **config.options,
            )  # fmt: skip
            return data.out[slot]

        return launch

    candidates, failures = {}, []
    for config in configs:
        launch = launcher(config)
        try:
            elapsed_ms(launch, 1, 1)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            failures.append(f"{config.name}: {error}".splitlines()[0][:200])
        else:
            candidates[config.name] = launch
    if not candidates:
        raise PeerUnavailable("; ".join(failures))
    best = fastest(candidates, data.case.slots)
    return Candidate(candidates[best], best)
