"""`cute_kernels.patch_embed`, through its public function, with the default or a given configuration."""

from __future__ import annotations

import torch

import cute_kernels
from bench.cases import SCALE_A, SCALE_B, Case, CaseData
from bench.configs import arch_of
from bench.peers import Candidate
from cute_kernels.config import PatchEmbedConfig, PatchEmbedProblem
from cute_kernels.operations.compile import compile_plan
from cute_kernels.plan import make_plan


def compile_ahead(case: Case, config: PatchEmbedConfig | None, device: torch.device) -> None:
    """Compiles the kernel of a case into the in-memory cache, without its tensors.

    Raises:
        ValueError: the plan refuses the configuration.
    """
    arch = arch_of(torch.cuda.get_device_capability(device))
    problem = PatchEmbedProblem(case.rows, case.n, case.k, table_rows=case.positions, in_dtype=case.dtype)
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    compile_plan(make_plan(problem, config, arch, sm_count=sm_count))


def build(data: CaseData, config: PatchEmbedConfig | None = None) -> Candidate:
    """Our kernel; its output is allocated by every call, as a user's is.

    Graphs are captured with frozen constants: the peers' tables, too, are built once and never again.
    """
    case = data.case
    inputs = [x.view(case.images, case.positions, case.k) for x in data.x]
    scales = {"scale_a": SCALE_A, "scale_b": SCALE_B} if case.fp8 else {}

    def launch(slot: int) -> torch.Tensor:
        return cute_kernels.patch_embed(inputs[slot], data.weight, data.bias, data.pos, config=config, **scales)

    return Candidate(launch, "default" if config is None else "", cute_kernels.frozen_constants)
