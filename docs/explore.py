# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Exploring tile parameters without a GPU
#
# Choose a configuration, see what it needs, execute its PTX, count what every unit does, and look at a timeline. Open
# this file as a notebook with jupytext or an editor that knows `# %%` cells, or run it: `python docs/explore.py`. It
# writes `trace.json` and `trace.png` to the current folder.

# %%
import dataclasses

import torch

from cute_kernels.commands.trace_figure import draw_trace
from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.emulator import Options, Report
from cute_kernels.plan import Plan, make_plan
from cute_kernels.runtime.emulated import launch as emulate
from cute_kernels.runtime.operands import Operands

# %% [markdown]
# ## The problem and the candidates
#
# Two tiles of 256 x 256 (one CTA pair works through both) are enough: counts per tile hardly change with more of them.
# `m` is images x positions. Any field of `Sm100PatchEmbedConfig` can be varied; its docstring says what each is.

# %%
problem = PatchEmbedProblem(m=512, n=256, k=768, table_rows=196)
base = Sm100PatchEmbedConfig()
candidates = {
    "default": base,
    "128 columns": dataclasses.replace(base, tile_n=128, stages=6),
    "BF16 epilogue": dataclasses.replace(base, epilogue="bf16x2"),
}

# %% [markdown]
# ## What a configuration needs
#
# Planning needs no GPU and refuses what the hardware cannot do, with the nearest value that it can.

# %%
plans: dict[str, Plan] = {name: make_plan(problem, config, sm_count=2) for name, config in candidates.items()}
lines = plans["default"].describe()
width = max(len(what) for what, _ in lines)
for what, value in lines:
    print(f"{what:{width}}  {value}")

try:
    make_plan(problem, dataclasses.replace(base, stages=9))
except ValueError as error:
    print(f"\nstages=9: {error}")

# %% [markdown]
# ## What it does
#
# The emulator executes the PTX that CuTe DSL generates. Inputs are random; no count depends on their values.


# %%
def run(plan: Plan, options: Options) -> Report:
    """Executes one launch on random inputs."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    p = plan.problem
    x, weight = draw(p.m, p.k).to(torch.float8_e4m3fn), draw(p.n, p.k).to(torch.float8_e4m3fn)
    table = draw(*plan.table_shape).to(getattr(torch, plan.table_dtype))
    out = torch.empty(p.m, p.n, dtype=torch.bfloat16)
    return emulate(plan, Operands(x=x, weight=weight, table=table, scale=0.5, out=out), options)


reports = {name: run(plan, Options(counters=True)) for name, plan in plans.items()}

# %% [markdown]
# ## Counts
#
# Per CTA and 128 x 256 outputs, so that configurations with different tiles compare. Shared memory in wavefronts of 128
# bytes; docs/emulator/counters.md explains the counters.

# %%
parts = problem.m * problem.n // (128 * 256)
COUNTERS = {
    "warp instructions": lambda r: r.warp_instructions,
    "TMA fill": lambda r: r.units.total("wavefronts", "tma.load"),
    "MMA operand reads": lambda r: r.units.total("operand_wavefronts", "mma"),
    "staging writes": lambda r: r.units.total("wavefronts", "st.shared"),
    "bank conflicts": lambda r: r.units.total("bank_conflicts"),
    "table sectors of 32 B": lambda r: r.units.total("sectors", "ld.global"),
    "TMEM bytes loaded": lambda r: r.units.total("bytes", "tmem.ld"),
    "L2 bytes read": lambda r: r.units.total("l2_bytes_read"),
}
counts = {
    name: {counter: value(report) / parts for counter, value in COUNTERS.items()} for name, report in reports.items()
}
print(f"{'':26}" + "".join(f"{name:>18}" for name in counts))
for counter in COUNTERS:
    print(f"{counter:26}" + "".join(f"{values[counter]:18,.0f}" for values in counts.values()))

# %% [markdown]
# Instructions by role and class, the most frequent ones:

# %%
for role, classes in reports["default"].units.instructions.items():
    print(f"{role:9} " + ", ".join(f"{count:,} {name}" for name, count in list(classes.items())[:8]))

# %% [markdown]
# ## A timeline
#
# Under a random schedule, drawn from the seed. Open `trace.json` in https://ui.perfetto.dev to move around in it. The
# axis counts steps of the schedule and is not time: who waits for whom is real, how long is not.

# %%
report = run(plans["default"], Options(trace="trace.json", completion="random", interleave="random", seed=1))
draw_trace("trace.json").savefig("trace.png")
