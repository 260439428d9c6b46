# %% [markdown]
# # Configurations of a kernel, side by side
#
# Edit the next cell and run all: which configurations are legal and why not, what they need, what they do, how long
# they should take, and how long they do where there is a GPU. Nothing else needs a GPU.

# %%
from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig

problem = PatchEmbedProblem(m=928256, n=768, k=768, table_rows=196)
base = Sm100PatchEmbedConfig()
arch = "sm_100a"
varied = {"tile_n": (128, 256), "stages": (2, 3, 4, 6)}
jobs = 2

# %% [markdown]
# ## Legality, registers, spills, modelled time
#
# Row 0 is what the problem gets without a configuration. Spilled registers lie on the stack: 0 bytes of it are no
# spills. Times are modelled, never measured; each is a sum, of which the largest part is named. Counts, below, are of a
# smaller problem.

# %%
from cute_kernels.commands import sweep
from cute_kernels.explore import explorer, sweep_figure, sweep_outcomes, sweep_table

small = explorer.smaller(problem)
rows = sweep_table.sweep(problem, base, [None, *sweep_table.grid(**varied)], arch=arch, counted=small, jobs=jobs)
print("\n".join(sweep.lines_of(rows)))
table = explorer.frame(rows)  # of pandas, where it is installed

# %% [markdown]
# ## Memory maps and the Pareto plot
#
# Shared memory of a CTA, modelled time against it, and the columns of tensor memory where the kernel has any. Of
# configurations with one modelled time none is on the front.

# %%
if any(row.smem for row in rows):
    explorer.show(sweep_figure.draw(rows), sweep_figure.alternative(rows))

# %% [markdown]
# ## Counts
#
# What the emulator counts when it executes the smaller problem, by the numbers of the table.

# %%
print(small)
print(explorer.counts_table(rows))

# %% [markdown]
# ## Measured time

# %%
rows, reason = explorer.measured(problem, rows)
print(f"not measured: {reason}" if reason else "\n".join(sweep.lines_of(rows)))

# %% [markdown]
# ## Configurations of the least time, to copy
#
# The least measured time first, or the least modelled time where nothing is measured. Configurations of one time tie.

# %%
print("\n".join([*sweep.ranking(rows, 3), *sweep_outcomes.effects(rows), *sweep.caveats(rows)]))
chosen = [alike[0] for alike in sweep_outcomes.ranked(rows)[:3]] or [row for row in rows if row.reason is None][:1]
for row in chosen:
    print(f"  {row.config}")

# %% [markdown]
# ## A timeline
#
# The first of these on the smaller problem, under a random schedule. Its axis counts steps and is not time: who waits
# for whom is real, how long is not.

# %%
if chosen:
    explorer.show(explorer.timeline(small, chosen[0]), "Who works and who waits for whom, in steps")
