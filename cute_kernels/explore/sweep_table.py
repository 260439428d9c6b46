"""A table of configurations of a kernel: which are legal, what they need, what the emulator counts, times."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from cute_kernels.common import extras
from cute_kernels.common.executors import Workers
from cute_kernels.explore import plan_facts
from cute_kernels.operations import compile
from cute_kernels.plan import ARCHS, PLANNERS, Plan, make_plan, predict
from cute_kernels.plan.base import IllegalValue, Kernel, Prediction, SmemRegion, TmemRegion


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration."""

    # the fields that were varied, and their values; none of what the plan chooses by itself
    settings: Mapping[str, Any]
    # the whole configuration, with what the plan chose for the problem; None if its type refuses the values, and for
    # programs
    config: Any = None
    # fields that had to follow the settings: their values, where these are not the row's 0
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    design: str | None = None  # which kernels run, as `Plan.runs` says; None for programs
    # why it is not legal; None for a legal one, and only a legal one has what follows but ``status``
    reason: str | None = None
    # arrays of a CTA's dynamic shared memory in address order: name, offset and bytes
    smem: tuple[SmemRegion, ...] = ()
    smem_limit: int = 0  # bytes of shared memory that a CTA may have on the architecture
    # what is in the columns of tensor memory that a CTA allocates; empty before sm_100
    tmem: tuple[TmemRegion, ...] = ()
    registers: int | None = None  # of a thread, from the machine code; None where it was not compiled
    stack_bytes: int | None = None  # of a thread; spilled registers lie there
    prediction: Prediction | None = None  # modelled, never measured; None where no model knows the kernel
    # microseconds on the GPU at hand, in a CUDA graph; None where it was not asked for, or nothing times the operation
    measured: float | None = None
    # what the emulator counts of a smaller problem, as `cute_kernels.explore.plan_facts.counted`
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # layouts and accesses of one launch of what is counted, as of `own_layouts.OwnMemory`: of a chain the last, of a
    # program that with the most shared memory; None: unknown
    memory: Any = None
    small: Plan | None = None  # plan of that problem, for the same kernel; None where nothing is counted
    arch: str | None = None  # what the row is planned for, or the program's kernels are compiled for
    # of a program whose kernels are at fault, or refused by the emulator: that which ``emulate`` exits with
    status: int = 0

    def plan(self, problem: Any, *, sm_count: int | None = None) -> Plan:
        """The plan of this configuration for a problem, on the architecture of the table; raises as `make_plan`."""
        return make_plan(problem, self.config, self.arch, sm_count=sm_count)

    @property
    def microseconds(self) -> float | None:
        """Modelled time."""
        return None if self.prediction is None else self.prediction.microseconds

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.smem[-1].offset + self.smem[-1].nbytes if self.smem else 0

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory up to the last one that holds something."""
        return max((region.first + region.columns for region in self.tmem), default=0)


def grid(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination of the values of each field; the last field varies fastest."""
    return [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]


def around(problem: Any, kind: type, arch: str) -> tuple[Any, Any]:
    """Configurations of a kernel to put settings into: what it gets for a problem, complete, then with open fields.

    ``problem``, ``arch``: as for `make_plan`. ``kind``: the class of the kernel's configurations, which the problem
    need not get by itself. Raises ValueError: the kernel cannot compute the problem."""
    usual = _kernel_of(problem, kind, arch).choose(problem, ARCHS[arch], ARCHS[arch].sm_count)
    return make_plan(problem, usual, arch).config, usual


def _kernel_of(problem: Any, kind: type, arch: str) -> Kernel:
    planner = next(planner for planner in PLANNERS.values() if planner.problem is type(problem))
    return next(kernel for kernel in planner.of(arch) if kernel.config is kind)


def sweep(
    problem: Any,
    base: Any,
    settings: Iterable[Mapping[str, Any] | None],
    *,
    following: Sequence[str] = (),
    arch: str | None = None,
    counted: bool = False,
    compiled: bool = True,
    measured: bool = False,
    seen: Callable[[Row], None] | None = None,
    executor: Executor | Callable[[], Executor] | None = None,
    jobs: int = 1,
    store: Any = None,
) -> list[Row]:
    """Evaluates configurations, in their order; needs no GPU unless times are to be measured.

    Args:
        problem: of any operation; what is planned, and timed by the model.
        base: configuration that the settings are put into; of several, as of `around`, the first that is legal with
            them.
        settings: fields of ``base`` and their values, one mapping for each configuration, as `grid` makes them; None
            is what the plan chooses for the problem on ``arch``.
        following: fields that are chosen anew in a row, unless it sets them, where the value of ``base`` is not legal
            there; the row names them.
        arch: a key of `ARCHS`; the first that has a configuration of the type of ``base`` when None.
        counted: execute a smaller problem in the emulator for its counts: the first of `Operation.smaller` that the
            kernels of the most rows compute unchanged, with tiles as full as those of the problem. Others have none.
        compiled: compile the legal ones, which takes seconds each; without it nobody knows registers and stack.
        measured: time the legal configurations for the GPU at hand too, in turns, with their results compared.
        seen: called with each row as soon as it and all before it are known.
        executor, jobs: as for `cute_kernels.common.executors.Workers`: configurations are evaluated in as many
            processes.
        store: a `cute_kernels.explore.store.Store`: keeps and gives rows, without measured times; rows of other shards
            are left out.

    Raises:
        TypeError: ``base`` belongs to another operation, or a setting is no field of it.
        ValueError: ``jobs`` below 1, or beside an executor.
        NotImplementedError: times are to be measured, and there is no GPU, or nothing that times this operation.
        MissingExtra: the extra ``emulator`` is not installed, which reads machine code; not asked for where nothing is
            compiled or counted.
    """
    if compiled or counted:
        extras.require("emulator", "a sweep, which reads machine code,")
    bases = base if isinstance(base, tuple) else (base,)
    kind = type(bases[0])
    names = [field.name for field in dataclasses.fields(kind)]
    settings = [None if chosen is None else dict(chosen) for chosen in settings]
    for name in dict.fromkeys(itertools.chain(*(chosen or () for chosen in settings))):
        if name not in names:
            raise TypeError(f"settings have {name!r}: must be fields of {kind.__name__}: {', '.join(names)}")
    if measured:
        check_measurable(problem)
    arch = arch or arch_of(bases[0])
    planned = [_planned(problem, bases, arch, chosen, following) for chosen in settings]
    small = _shown_small(problem, planned) if counted else {}
    work = [(replace(row, small=small.get(number)), plan, compiled) for number, (row, plan) in enumerate(planned)]
    if not (compiled or counted):
        executor, jobs = None, 1  # milliseconds: not worth a process
    origin = {"problem": repr(problem), "compiled": compiled}
    given = {"executor": executor, "jobs": jobs, "seen": seen, "store": store}
    rows = evaluated(_evaluate, (), work, origin=origin, **given)
    return measure(problem, rows) if measured else rows


def evaluated(
    evaluate: Callable[..., Row],
    state: tuple,
    tasks: Iterable[tuple],
    *,
    executor: Executor | Callable[[], Executor] | None,
    jobs: int,
    seen: Callable[[Row], None] | None,
    store: Any,
    origin: Mapping[str, Any],
) -> list[Row]:
    """Rows of tasks in their order, each evaluated with ``state`` in a worker, unless the store has it or leaves it to
    another shard. A task begins with its row as far as it is known. Raises ValueError: ``jobs`` below 1, or beside an
    executor."""
    if jobs < 1:
        raise ValueError(f"jobs = {jobs}: must be at least 1")
    rows, tasks = [], list(tasks)
    kept = {n: store and store.restored(task[0], origin) for n, task in enumerate(tasks)}
    wanted = [n for n, row in kept.items() if row is not None or store is None or store.mine(n)]
    with Workers(_together, state, executor, jobs) as workers:
        fresh = workers.each(evaluate, (tasks[n] for n in wanted if kept[n] is None))
        for n in wanted:
            row = kept[n] or next(fresh)
            if store is not None and kept[n] is None:
                store.add(row, origin)
            rows.append(row)
            if seen is not None:
                seen(row)
    return rows


def _together(*state: Any) -> tuple:
    return state


def _planned(
    problem: Any, bases: tuple, arch: str, chosen: Mapping[str, Any] | None, following: Sequence[str]
) -> tuple[Row, Plan | None]:
    """The row as far as its plan knows it, and that plan; None where it is refused."""
    row, first = Row(chosen or {}, arch=arch), None
    for base in bases if chosen is not None else (None,):
        try:
            row = replace(row, config=None if base is None else replace(base, **row.settings))
            plan = row.plan(problem)
            break
        except (ValueError, NotImplementedError) as reason:
            first, row = first or row.config, replace(row, reason=str(reason))
    else:
        plan = _followed(problem, replace(row, config=first), [name for name in following if name not in row.settings])
        if plan is None:
            return row, None
    values = [(each.name, getattr(plan.config, each.name)) for each in dataclasses.fields(plan.config)]
    usual = plan.config if chosen is None else replace(bases[0], **row.settings)
    row = replace(
        row,
        config=plan.config,
        others={name: one for name, one in values if getattr(usual, name) not in (None, one)},
        reason=None,
        design=plan.runs,
        prediction=predict(plan),
    )
    if plan.launches == (plan,):  # each kernel of a chain has registers and memory of its own
        row = replace(row, smem=plan.smem, smem_limit=plan.arch.smem_bytes, tmem=plan.tmem)
    return row, plan


_SHAPE = ("tile", "block_m")
"""How names of fields begin that say what a tile is."""


def _followed(problem: Any, row: Row, following: Sequence[str]) -> Plan | None:
    """The plan of a refused row with others of these fields' values: the nearest legal ones, if need be beside another
    value of one field, first of those that turn something on or off. None: there is none."""
    if row.config is None or not following:
        return None
    fields = _kernel_of(problem, type(row.config), row.arch).fields
    current = {name: getattr(row.config, name) for name in following}
    turned = [{name: not one} for name, one in current.items() if isinstance(one, bool)]
    # A tile of another shape is another question. Buffers come last in a configuration, and follow first.
    counts = {name: one for name, one in reversed(current.items()) if type(one) is int and not name.startswith(_SHAPE)}
    legal = ((name, each) for name in counts if name in fields for each in fields[name].legal)
    near = sorted(legal, key=lambda pair: abs(math.log2(max(pair[1], 1) / max(counts[pair[0]], 1))))
    for change in ({}, *turned, *({name: each} for name, each in near)):
        tried = replace(row, config=replace(row.config, **change))
        for _ in range(len(following) + 1):
            try:
                return tried.plan(problem)
            except IllegalValue as refusal:
                if refusal.field not in following or refusal.field in change:
                    break
                tried = replace(tried, config=replace(tried.config, **{refusal.field: refusal.nearest}))
            except (ValueError, NotImplementedError):
                break
    return None


_AS_FULL = 0.95
"""Outputs of a tile of the smaller problem, as a part of those of the whole one, from which on its tiles are full."""


def _shown_small(problem: Any, planned: Sequence[tuple[Row, Plan | None]]) -> dict[int, Plan]:
    """Plans of the smaller problem that shows the most rows, by the row's number."""
    import cute_kernels.operations.registry as registry

    legal = {number: (row, plan) for number, (row, plan) in enumerate(planned) if plan is not None}
    # Two clusters of any row, so that few tiles fill them.
    sm_count = max((2 * math.prod(plan.cluster) for _, plan in legal.values()), default=2)
    best: dict[int, Plan] = {}
    for small in registry.operation_of(problem).smaller(problem):
        found = {number: _same_kernel(small, row, plan, sm_count) for number, (row, plan) in legal.items()}
        found = {number: plan for number, plan in found.items() if plan is not None}
        best = max(best, found, key=len)
        if len(best) == len(legal):
            break
    return best


def _same_kernel(small: Any, row: Row, plan: Plan, sm_count: int) -> Plan | None:
    """The plan of a smaller problem for a row whose kernel and configuration it leaves as they are; None without."""
    try:
        made = row.plan(small, sm_count=sm_count)
    except (ValueError, NotImplementedError):
        return None
    same = [each.kernel_key for each in made.launches] == [each.kernel_key for each in plan.launches]
    return made if same and _outputs_of_a_tile(made) >= _AS_FULL * _outputs_of_a_tile(plan) else None


def _outputs_of_a_tile(plan: Plan) -> float:
    last = plan.launches[-1]
    rows = last.problem.m if hasattr(last.problem, "m") else last.problem.batch * last.problem.positions
    return rows * last.problem.n * getattr(last.problem, "batches", 1) / last.tiles


def check_measurable(problem: Any) -> tuple[Any, Any]:
    """The operation that times a problem, and the GPU at hand. Raises NotImplementedError: there is no GPU with a
    kernel, or nothing times this kind of problem."""
    import cute_kernels.explore.tuning.search as search
    import cute_kernels.operations.registry as registry

    try:
        operation = registry.operation_of(problem)
    except TypeError as reason:
        raise NotImplementedError(f"nothing times it: {reason}") from None
    return operation, search.device_at_hand("a measured sweep")


def measure(problem: Any, rows: Sequence[Row]) -> list[Row]:
    """The rows with the median microseconds of each legal one, in CUDA graphs and in turn, on the GPU at hand.

    A configuration for another architecture than that GPU's has none. Results of all are compared with the first's.
    Raises NotImplementedError: as `check_measurable`; RuntimeError: a configuration computes something else than the
    first one."""
    import cute_kernels.explore.tuning.search as search

    operation, device = check_measurable(problem)
    plans: dict[int, Plan] = {}
    for number, row in enumerate(rows):
        if row.reason is None:
            plan = row.plan(problem, sm_count=device.sm_count)
            if plan.arch.name == device.arch:
                plans[number] = plan
    measured = list(plans.values())
    inputs = search.input_sets(operation, problem) if measured else []
    times = search.interleaved(search.timers_of(operation, measured, inputs), search.ROUNDS)
    return [
        replace(row, measured=1e3 * times[plans[number]]) if number in plans else row for number, row in enumerate(rows)
    ]


# --- one configuration, in a worker ----------------------------------------------------------------------------------


def _evaluate(_: tuple, row: Row, plan: Plan | None, compiled: bool) -> Row:
    if row.small is not None:
        import cute_kernels.explore.own_layouts as own_layouts  # the emulator

        launches = plan_facts.launched(row.small)
        launch, report = launches[-1]
        counts = dict(plan_facts.counts_of(report for _, report in launches))
        row = replace(row, counts=counts, memory=own_layouts.of_launch(launch, report.units))
    if plan is None or not compiled or plan.launches != (plan,):
        return row
    resources = compile.compile_plan(plan, emulated=True).resources
    return replace(row, registers=resources.registers, stack_bytes=resources.stack_bytes)


def arch_of(config: Any) -> str:
    """The architecture whose kernel has such a configuration."""
    return next(planner.kinds[type(config)] for planner in PLANNERS.values() if type(config) in planner.kinds)
