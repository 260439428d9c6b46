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
# Choose a configuration, see what it needs, how long it should take and what bounds it, execute its PTX, count what
# every unit does, and look at a timeline. Open this file as a notebook with jupytext or an editor that knows `# %%`
# cells, or run it: `python docs/explore.py`. It writes `trace.json` and `trace.html` to the current folder.

# %%
import dataclasses
from pathlib import Path

import torch

from cute_kernels.config import PatchEmbedConfig, PatchEmbedProblem, Sm100PatchEmbedConfig, Sm100ResidentConfig
from cute_kernels.emulator import Options, Report
from cute_kernels.explore import explorer, page
from cute_kernels.operations.runtime.emulated import launch as emulate
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import Plan, make_plan, predict

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
# ## How long it should take
#
# On a B200, at the size where time matters: 4736 images of 196 patches. The model multiplies what the busiest CTA does
# by what a unit of it costs. Its times are modelled, never measured; docs/model.md says how well it does, and that
# designs unlike those that it was fitted to have an error of a quarter. The last line is what a plan without a
# configuration gets. "bound by" is what takes most of the time.

# %%
large = PatchEmbedProblem(m=4736 * 196, n=768, k=768, table_rows=196)
timed: dict[str, PatchEmbedConfig | None] = {
    **candidates,
    "a row after the other": dataclasses.replace(base, order="flat"),
    "16 columns a load": dataclasses.replace(base, tmem_load_width=16),
    "weight in SMEM": Sm100ResidentConfig(weight="smem"),
    "weight in TMEM": Sm100ResidentConfig(weight="tmem"),
    "chosen": None,
}
predictions = {name: predict(make_plan(large, config)) for name, config in timed.items()}
print(f"{'':22}{'modelled us':>12}  largest part of the sum")
for name, prediction in predictions.items():
    share = prediction.parts[prediction.largest_part] / prediction.microseconds
    print(f"{name:22}{prediction.microseconds:12,.0f}  {prediction.largest_part}, {share:.0%}")

print(next(iter(predictions.values())).caveat)

# %% [markdown]
# Where the time goes, in microseconds, a column for each line above. Of what runs beside each other only the longest is
# counted, so that a 0 may be work that something longer hides:

# %%
units = list(dict.fromkeys(part for prediction in predictions.values() for part in prediction.parts))
for unit in units:
    print(f"{unit:24}" + "".join(f"{p.parts.get(unit, 0):8,.0f}" for p in predictions.values()))

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
# Under a random schedule, drawn from the seed. `trace.html` shows the first cluster; open `trace.json` in
# https://ui.perfetto.dev to see all.

# %%
report = run(plans["default"], Options(trace="trace.json", completion="random", interleave="random", seed=1))
Path("trace.html").write_text(page.timeline_page(explorer.drawn("trace.json"), "trace.json"))
