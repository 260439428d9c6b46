"""A table of configurations: verdict of the planner, memory, registers, what the emulator counts, times."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from cute_kernels import compile, extras
from cute_kernels.commands import plan_facts
from cute_kernels.executors import Workers
from cute_kernels.plan import Plan, SmemRegion, TmemRegion, make_plan, predict


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        settings: the fields that were varied, and their values.
        config: the whole configuration, in which what the plan chooses is left open; None if its type refuses the
            values, and for programs.
        reason: why it is not legal; None for a legal one, and only a legal one has what follows but ``status``.
        smem: arrays of a CTA's dynamic shared memory in address order: name, offset and bytes.
        tmem: what is in the columns of tensor memory that a CTA allocates; empty before sm_100.
        registers: of a thread, from the machine code.
        stack_bytes: of a thread; spilled registers lie there.
        microseconds: modelled, never measured; None where no model knows the kernel.
        largest_part: of that time, which is a sum: it bounds nothing.
        caveat: what is known of the errors of the model that gave it.
        measured: microseconds on the GPU at hand, in a CUDA graph; None where it was not asked for, or nothing times
            the operation.
        counts: what the emulator counts of the smaller problem, as `cute_kernels.commands.plan_facts.counted`.
        status: of a program whose kernels are at fault, or refused by the emulator: that which ``emulate`` exits with.
    """

    settings: Mapping[str, Any]
    config: Any = None
    reason: str | None = None
    smem: tuple[SmemRegion, ...] = ()
    tmem: tuple[TmemRegion, ...] = ()
    registers: int | None = None
    stack_bytes: int | None = None
    microseconds: float | None = None
    largest_part: str | None = None
    caveat: str | None = None
    measured: float | None = None
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    status: int = 0

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
    settings: Iterable[Mapping[str, Any]],
    *,
    counted: Any = None,
    measured: bool = False,
    executor: Executor | Callable[[], Executor] | None = None,
    jobs: int = 1,
) -> list[Row]:
    """Evaluates configurations, in their order; needs no GPU unless times are to be measured.

    Args:
        problem: of any operation; what is planned, and timed by the model.
        base: configuration that the settings are put into.
        settings: fields of ``base`` and their values, one mapping for each configuration, as `grid` makes them.
        counted: a smaller problem of the same operation, executed in the emulator for its counts, on two
            multiprocessors so that few tiles fill them; None counts nothing.
        measured: time the legal configurations for the GPU at hand too, in turns, with their results compared.
        executor, jobs: as for `cute_kernels.executors.Workers`: configurations are evaluated in as many processes.

    Raises:
        TypeError: ``base`` belongs to another operation, ``counted`` is another kind of problem, or a setting is no
            field of ``base``.
        ValueError: ``jobs`` below 1, or beside an executor.
        NotImplementedError: times are to be measured, and there is no GPU, or nothing that times this operation.
        MissingExtra: the extra ``emulator`` is not installed, which reads machine code.
    """
    extras.require("emulator", "a sweep, which reads machine code,")
    settings = [dict(chosen) for chosen in settings]
    names = [field.name for field in dataclasses.fields(base)]
    for name in dict.fromkeys(itertools.chain(*settings)):
        if name not in names:
            raise TypeError(f"settings have {name!r}, allowed for {type(base).__name__}: {', '.join(names)}")
    if counted is not None and type(counted) is not type(problem):
        raise TypeError(f"counted is {type(counted).__name__}, expected {type(problem).__name__}, as of problem")
    if jobs < 1:
        raise ValueError(f"jobs = {jobs}, allowed: at least 1")
    if measured:
        check_measurable(problem)
    with Workers(_prepare, (problem, base, counted), executor, jobs) as workers:
        rows = list(workers.each(_evaluate, [(chosen,) for chosen in settings]))
    return measure(problem, rows) if measured else rows


def ranked(rows: Iterable[Row]) -> list[list[Row]]:
    """The legal configurations by measured time, or by modelled time where none is measured, quickest first.

    Configurations of one time are one class, in the order of the rows: the model does not tell them apart.
    """
    rows = list(rows)
    what = "microseconds" if all(row.measured is None for row in rows) else "measured"
    classes: dict[float, list[Row]] = {}
    for row in rows:
        if getattr(row, what) is not None:
            classes.setdefault(getattr(row, what), []).append(row)
    return [classes[time] for time in sorted(classes)]


def pareto(rows: Iterable[Row]) -> list[Row]:
    """Configurations that no other is as good as in both modelled time and shared memory and better in one.

    None whose modelled time another one shares: which of them is quicker, the model does not say.
    """
    timed = [row for row in rows if row.microseconds is not None]
    times = collections.Counter(row.microseconds for row in timed)
    return [
        row
        for row in timed
        if times[row.microseconds] == 1
        and not any(
            other is not row and other.microseconds <= row.microseconds and other.smem_bytes <= row.smem_bytes
            for other in timed
        )
    ]


def differing(rows: Sequence[Row]) -> list[str]:
    """The fields of their settings in which rows differ."""
    names = dict.fromkeys(name for row in rows for name in row.settings)
    return [name for name in names if any(row.settings.get(name) != rows[0].settings.get(name) for row in rows)]


# --- times on a GPU --------------------------------------------------------------------------------------------------

_ROUNDS = 7  # of all configurations in turn; the median counts


def check_measurable(problem: Any) -> None:
    """Refuses to measure where nothing can be.

    Raises:
        NotImplementedError: there is no GPU with a kernel, or nothing times this kind of problem.
    """
    import cute_kernels.operations.registry as registry
    import cute_kernels.tuning.search as search

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
    import cute_kernels.operations.registry as registry
    import cute_kernels.tuning.search as search

    check_measurable(problem)
    with search.device_at_hand("a measured sweep", None) as device:
        plans: dict[int, Plan] = {}
        for number, row in enumerate(rows):
            if row.reason is None:
                plan = make_plan(problem, row.config)
                if plan.arch.name == device.arch:
                    plans[number] = make_plan(problem, row.config, sm_count=device.sm_count)
        operation, measured = registry.operation_of(problem), list(plans.values())
        inputs = search.input_sets(operation, problem) if measured else []
        times = search.interleaved(search.timers_of(operation, measured, inputs), _ROUNDS)
    return [
        dataclasses.replace(row, measured=1e3 * times[plans[number]]) if number in plans else row
        for number, row in enumerate(rows)
    ]


# --- one configuration, in a worker ----------------------------------------------------------------------------------

_SM_COUNT = 2  # of the counted problem


def _prepare(problem: Any, base: Any, counted: Any) -> tuple[Any, Any, Any]:
    return problem, base, counted


def _evaluate(state: tuple[Any, Any, Any], chosen: Mapping[str, Any]) -> Row:
    problem, base, counted = state
    row = Row(chosen)
    try:
        row = dataclasses.replace(row, config=dataclasses.replace(base, **chosen))
        plan = make_plan(problem, row.config)
        small = None if counted is None else make_plan(counted, row.config, sm_count=_SM_COUNT)
    except (ValueError, NotImplementedError) as reason:
        return dataclasses.replace(row, reason=str(reason))
    prediction = predict(plan)
    row = dataclasses.replace(
        row,
        microseconds=None if prediction is None else prediction.microseconds,
        largest_part=None if prediction is None else prediction.largest_part,
        caveat=None if prediction is None else prediction.caveat,
        counts={} if small is None else dict(plan_facts.counted(small)),
    )
    if plan.launches != (plan,):  # each kernel of a chain has registers and memory of its own
        return row
    resources = compile.compile_plan(plan, emulated=True).resources
    return dataclasses.replace(
        row, smem=plan.smem, tmem=plan.tmem, registers=resources.registers, stack_bytes=resources.stack_bytes
    )
