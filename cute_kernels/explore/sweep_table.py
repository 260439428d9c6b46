"""A table of configurations: verdict of the planner, memory, registers, what the emulator counts, times."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from cute_kernels.common import extras
from cute_kernels.common.executors import Workers
from cute_kernels.explore import plan_facts
from cute_kernels.operations import compile
from cute_kernels.plan import PLANNERS, Plan, make_plan, predict
from cute_kernels.plan.base import SmemRegion, TmemRegion
from cute_kernels.plan.prediction import Prediction


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        settings: the fields that were varied, and their values; none of what the plan chooses by itself.
        config: the whole configuration, in which what the plan chooses is left open; None if its type refuses the
            values, and for programs.
        design: which kernels run, as `Plan.runs` says; None for programs.
        reason: why it is not legal; None for a legal one, and only a legal one has what follows but ``status``.
        smem: arrays of a CTA's dynamic shared memory in address order: name, offset and bytes.
        tmem: what is in the columns of tensor memory that a CTA allocates; empty before sm_100.
        registers: of a thread, from the machine code; None where it was not compiled.
        stack_bytes: of a thread; spilled registers lie there.
        prediction: modelled, never measured; None where no model knows the kernel.
        measured: microseconds on the GPU at hand, in a CUDA graph; None where it was not asked for, or nothing times
            the operation.
        counts: what the emulator counts of the smaller problem, as `cute_kernels.explore.plan_facts.counted`.
        arch: a key of `ARCHS`, for which the row is planned; of programs None.
        status: of a program whose kernels are at fault, or refused by the emulator: that which ``emulate`` exits with.
    """

    settings: Mapping[str, Any]
    config: Any = None
    design: str | None = None
    reason: str | None = None
    smem: tuple[SmemRegion, ...] = ()
    tmem: tuple[TmemRegion, ...] = ()
    registers: int | None = None
    stack_bytes: int | None = None
    prediction: Prediction | None = None
    measured: float | None = None
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    status: int = 0
    arch: str | None = None

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


def sweep(
    problem: Any,
    base: Any,
    settings: Iterable[Mapping[str, Any] | None],
    *,
    arch: str | None = None,
    counted: Any = None,
    compiled: bool = True,
    measured: bool = False,
    seen: Callable[[Row], None] | None = None,
    executor: Executor | Callable[[], Executor] | None = None,
    jobs: int = 1,
) -> list[Row]:
    """Evaluates configurations, in their order; needs no GPU unless times are to be measured.

    Args:
        problem: of any operation; what is planned, and timed by the model.
        base: configuration that the settings are put into.
        settings: fields of ``base`` and their values, one mapping for each configuration, as `grid` makes them; None
            is what the plan chooses for the problem on ``arch``.
        arch: a key of `ARCHS`; the first that has a configuration of the type of ``base`` when None.
        counted: a smaller problem of the same operation, executed in the emulator for its counts, on two
            multiprocessors so that few tiles fill them; None counts nothing.
        compiled: compile the legal ones, which takes seconds each; without it nobody knows registers and stack.
        measured: time the legal configurations for the GPU at hand too, in turns, with their results compared.
        seen: called with each row as soon as it and all before it are known.
        executor, jobs: as for `cute_kernels.common.executors.Workers`: configurations are evaluated in as many
            processes.

    Raises:
        TypeError: ``base`` belongs to another operation, ``counted`` is another kind of problem, or a setting is no
            field of ``base``.
        ValueError: ``jobs`` below 1, or beside an executor.
        NotImplementedError: times are to be measured, and there is no GPU, or nothing that times this operation.
        MissingExtra: the extra ``emulator`` is not installed, which reads machine code; not asked for where nothing is
            compiled or counted.
    """
    if compiled or counted is not None:
        extras.require("emulator", "a sweep, which reads machine code,")
    settings = [None if chosen is None else dict(chosen) for chosen in settings]
    names = [field.name for field in dataclasses.fields(base)]
    for name in dict.fromkeys(itertools.chain(*(chosen or () for chosen in settings))):
        if name not in names:
            raise TypeError(f"settings have {name!r}, allowed for {type(base).__name__}: {', '.join(names)}")
    if counted is not None and type(counted) is not type(problem):
        raise TypeError(f"counted is {type(counted).__name__}: must be {type(problem).__name__}, as of problem")
    if measured:
        check_measurable(problem)
    state = (problem, base, arch or arch_of(base), counted, compiled)
    rows = evaluated(_evaluate, state, settings, executor=executor, jobs=jobs, seen=seen)
    return measure(problem, rows) if measured else rows


def evaluated(
    evaluate: Callable[[Any, Any], Row],
    state: tuple,
    settings: Iterable[Any],
    *,
    executor: Executor | Callable[[], Executor] | None,
    jobs: int,
    seen: Callable[[Row], None] | None,
) -> list[Row]:
    """Rows of configurations in their order, each evaluated with ``state`` in a worker.

    Raises:
        ValueError: ``jobs`` below 1, or beside an executor.
    """
    if jobs < 1:
        raise ValueError(f"jobs = {jobs}: must be at least 1")
    rows = []
    with Workers(_together, state, executor, jobs) as workers:
        for row in workers.each(evaluate, [(chosen,) for chosen in settings]):
            rows.append(row)
            if seen is not None:
                seen(row)
    return rows


def _together(*state: Any) -> tuple:
    return state


# --- times on a GPU --------------------------------------------------------------------------------------------------

_ROUNDS = 7  # of all configurations in turn; the median counts


def check_measurable(problem: Any) -> None:
    """Refuses to measure where nothing can be.

    Raises:
        NotImplementedError: there is no GPU with a kernel, or nothing times this kind of problem.
    """
    import cute_kernels.explore.tuning.search as search
    import cute_kernels.operations.registry as registry

    try:
        registry.operation_of(problem)
    except TypeError as reason:
        raise NotImplementedError(f"nothing times it: {reason}") from None
    with search.device_at_hand("a measured sweep", None):
        pass


def measure(problem: Any, rows: Sequence[Row]) -> list[Row]:
    """The rows with the median microseconds of each legal one, in CUDA graphs and in turn, on the GPU at hand.

    A configuration for another architecture than that GPU's has none. Results of all are compared with the first's.

    Raises:
        NotImplementedError: as `check_measurable`.
        RuntimeError: a configuration computes something else than the first one.
    """
    import cute_kernels.explore.tuning.search as search
    import cute_kernels.operations.registry as registry

    check_measurable(problem)
    with search.device_at_hand("a measured sweep", None) as device:
        plans: dict[int, Plan] = {}
        for number, row in enumerate(rows):
            if row.reason is None:
                plan = row.plan(problem, sm_count=device.sm_count)
                if plan.arch.name == device.arch:
                    plans[number] = plan
        operation, measured = registry.operation_of(problem), list(plans.values())
        inputs = search.input_sets(operation, problem) if measured else []
        times = search.interleaved(search.timers_of(operation, measured, inputs), _ROUNDS)
    return [
        dataclasses.replace(row, measured=1e3 * times[plans[number]]) if number in plans else row
        for number, row in enumerate(rows)
    ]


# --- one configuration, in a worker ----------------------------------------------------------------------------------

_SM_COUNT = 2  # of the counted problem


def _evaluate(state: tuple[Any, Any, str, Any, bool], chosen: Mapping[str, Any] | None) -> Row:
    problem, base, arch, counted, compiled = state
    row = Row(chosen or {}, arch=arch)
    try:
        config = row.plan(problem).config if chosen is None else dataclasses.replace(base, **chosen)
        row = dataclasses.replace(row, config=config)
        plan = row.plan(problem)
        small = None if counted is None else row.plan(counted, sm_count=_SM_COUNT)
    except (ValueError, NotImplementedError) as reason:
        return dataclasses.replace(row, reason=str(reason))
    row = dataclasses.replace(
        row, design=plan.runs, prediction=predict(plan), counts={} if small is None else dict(plan_facts.counted(small))
    )
    if plan.launches != (plan,):  # each kernel of a chain has registers and memory of its own
        return row
    row = dataclasses.replace(row, smem=plan.smem, tmem=plan.tmem)
    if not compiled:
        return row
    resources = compile.compile_plan(plan, emulated=True).resources
    return dataclasses.replace(row, registers=resources.registers, stack_bytes=resources.stack_bytes)


def arch_of(config: Any) -> str:
    """The architecture whose kernel has such a configuration."""
    return next(planner.kinds[type(config)] for planner in PLANNERS.values() if type(config) in planner.kinds)
