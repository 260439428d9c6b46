"""Which of the SM100a kernels over rows a problem gets: by modelled time, and where that is no reason by counted work.

There is no time of this package behind it: no GPU of this architecture was at hand. The model is fitted to times of a
CUDA kernel whose weight is streamed (docs/model.md), and does not tell plans apart that it puts nearer to each other
than its own error (`cute_kernels.model.b200.quickest`). Of those the one with the least counted work
is taken. What is counted is what the emulator counts (`python -m bench.counters design`), at published rates:

* the tensor core's products of a tile, or the wavefronts of shared memory, whichever take longer: operands written by
  TMA and read by the MMAs, the output staged and read by TMA, and the loads of the table;
* a constant for each tile, for the signals between roles;
* times the tiles that the busiest cluster has;
* and, where the weight stays on chip, its way there: 32 lines for each load of 16 bytes per lane into tensor memory, a
  wavefront for 128 bytes by TMA into shared memory. A few images therefore get the weight in shared memory.

Per 256 x 256 outputs and 768 bytes of K a CTA has 2,560 wavefronts with the weight in tensor memory and 3,328 in shared
memory; where it is streamed 4,352 with two positions in a tile, and 5,120 and more where every row reads the table. The
products take 3,072 clocks. The kernel that streams takes every K; the weight of 128 features stays in tensor memory up
to K = 1,920 bytes, in shared memory up to 1,664.
"""

from __future__ import annotations

import contextlib
import functools

from cute_kernels.config import PatchEmbedConfig, PatchEmbedProblem, Sm100PatchEmbedConfig, Sm100ResidentConfig
from cute_kernels.model import b200
from cute_kernels.model.prediction import Prediction
from cute_kernels.plan import patch_embed_resident as resident
from cute_kernels.plan import patch_embed_sm100 as streamed
from cute_kernels.plan.base import Arch
from cute_kernels.plan.patch_embed import PatchEmbedPlan
from cute_kernels.plan.patch_embed_resident import Sm100ResidentPlan, longest_k, plan_resident
from cute_kernels.plan.patch_embed_sm100 import Sm100PatchEmbedPlan, plan_streamed, tile_wavefronts
from cute_kernels.plan.sm100_transposed import TILE_CLOCKS

_ALONE = Sm100PatchEmbedConfig(stages=3, cta_group=1)
"""For a device of one multiprocessor, which has no pair."""


def plan_sm100(
    problem: PatchEmbedProblem, config: PatchEmbedConfig | None, arch: Arch, sm_count: int
) -> Sm100PatchEmbedPlan | Sm100ResidentPlan:
    """The plan, or ValueError; that of `b200.quickest` when ``config`` is None."""
    if config is None:
        return _default(problem, arch, sm_count)
    planner = plan_resident if isinstance(config, Sm100ResidentConfig) else plan_streamed
    return planner(problem, config, arch, sm_count)


@functools.lru_cache(maxsize=1024)
def _default(problem: PatchEmbedProblem, arch: Arch, sm_count: int) -> PatchEmbedPlan:
    plans = []
    if problem.k <= longest_k(problem, Sm100ResidentConfig(), arch):
        plans.append(plan_resident(problem, Sm100ResidentConfig(), arch, sm_count))
    config = Sm100PatchEmbedConfig() if sm_count > 1 else _ALONE
    plans.append(plan_streamed(problem, config, arch, sm_count))
    return b200.quickest(plans, counted_clocks, lambda plan: True)


def predict(plan: Sm100PatchEmbedPlan | Sm100ResidentPlan) -> Prediction:
    """The modelled time of a launch on a B200.

    The costs are fitted to variants that stream the weight; of a weight on chip the model has seen no time.
    """
    return b200.predict(plan.work)


def counted_clocks(plan: Sm100PatchEmbedPlan | Sm100ResidentPlan) -> float:
    """Clocks of a launch, as far as counted work tells plans apart."""
    if isinstance(plan, Sm100ResidentPlan):
        return resident.cost(plan)
    return -(-plan.tiles // plan.clusters) * (max(plan.mma_clocks, tile_wavefronts(plan)) + TILE_CLOCKS)


def search_space(problem: PatchEmbedProblem, arch: Arch, sm_count: int) -> list[PatchEmbedPlan]:
    """Legal plans that are worth timing on a device: what the problem gets, then those of each design by modelled
    time."""
    plans = resident.search_space(problem, arch, sm_count)
    if sm_count > 1:
        plans += streamed.search_space(problem, arch, sm_count)
    plans.sort(key=lambda plan: predict(plan).microseconds)
    return list(dict.fromkeys((_default(problem, arch, sm_count), *plans)))


def why(plan: Sm100PatchEmbedPlan | Sm100ResidentPlan) -> str:
    """Where the weight is, with the modelled time and the counted work that designs are compared by; and the others."""
    others = []
    for config in (Sm100ResidentConfig(weight="tmem"), Sm100ResidentConfig(weight="smem"), Sm100PatchEmbedConfig()):
        with contextlib.suppress(ValueError):
            other = plan_sm100(plan.problem, config, plan.arch, plan.sm_count)
            if place(other) != place(plan):
                others.append(f"{place(other)} {_compared(other)}")
    return "; ".join((f"weight {place(plan)} {_compared(plan)}", *others))


def _compared(plan: Sm100PatchEmbedPlan | Sm100ResidentPlan) -> str:
    return f"{predict(plan).microseconds:,.1f} us modelled, {counted_clocks(plan):,.0f} clocks of counted work"


def place(plan: Sm100PatchEmbedPlan | Sm100ResidentPlan) -> str:
    """Where the weight is, in words."""
    if not isinstance(plan, Sm100ResidentPlan):
        return "streamed"
    return {"tmem": "in tensor memory", "smem": "in shared memory"}[plan.config.weight]

