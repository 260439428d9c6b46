# %% [markdown]
# # Configurations of a program with kernels of its own, side by side
#
# Edit the next cell and run all. Each combination of values is a run of the program in the emulator, with the values as
# its options: what it accepts, what it needs and what it does. No model knows the time of such a kernel.

# %%
script = "kernel.py"
arch = "sm_100a"
arguments = []
varied = {"stages": ("2", "3")}
jobs = 2

# %% [markdown]
# ## What the program accepts, registers, spills
#
# Spilled registers lie on the stack: 0 bytes of it are no spills. A configuration that is refused has the reason.

# %%
from cute_kernels.commands import sweep
from cute_kernels.explore import explorer, sweep_figure, sweep_outcomes, sweep_program, sweep_table

settings = sweep_table.grid(**varied)
rows = sweep_program.sweep_program(script, settings, arch=arch, arguments=arguments, jobs=jobs)
print("\n".join([*sweep.lines_of(rows), *sweep_outcomes.effects(rows)]))
table = explorer.frame(rows)  # of pandas, where it is installed

# %% [markdown]
# ## Memory maps, and one column against another
#
# Columns are those of the table and what the emulator counts.

# %%
if any(row.smem for row in rows):
    axes = "shared", "warp instructions"
    explorer.show(sweep_figure.draw(rows, *axes), sweep_figure.alternative(rows, *axes))

# %% [markdown]
# ## Counts

# %%
print(explorer.counts_table(rows))

# %% [markdown]
# ## A timeline
#
# Of the first configuration that is accepted, its first launch under a random schedule. The axis counts steps and is
# not time: who waits for whom is real, how long is not.

# %%
chosen = next((row for row in rows if row.reason is None), None)
if chosen is not None:
    figure = explorer.timeline_of_program(script, chosen.settings, arch=arch, arguments=arguments)
    explorer.show(figure, "Who works and who waits for whom, in steps")
