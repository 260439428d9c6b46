"""The way of a call, the same for every operation: check once, plan, prepare operands, launch, remember.

    operation(*arguments)
      | RepeatedCalls.run     known --------------------> launch
      v ArgumentTable.check   types, shapes, devices, once
      v Operation.plan        arguments -> problem -> plan
      v Operation.operands    plan + arguments -> tensors and numbers that the kernel takes
      v runtime               gpu | emulated, each compiling what is not compiled yet; or plain torch
      '- RepeatedCalls.put

An operation is a subclass of `Operation` with a dataclass of arguments (`cute_kernels.operations.arguments`) and what
is its own: shapes that depend on each other, its problem, its operands, its reference.
"""

import contextlib
import contextvars
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from cute_kernels.operations.arguments import ArgumentTable, choose_backend
from cute_kernels.operations.derivatives import Fact, Facts
from cute_kernels.operations.runtime import gpu, repeat
from cute_kernels.operations.runtime.constants import DERIVED, in_autograd_function
from cute_kernels.operations.runtime.devices import device_facts, tuned_config
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.operations.runtime.repeat import PLAIN_TENSORS, Repeatable, RepeatedCalls, ScaleProduct
from cute_kernels.operations.sharding import Shape, Sharding, register_if_used
from cute_kernels.plan import Plan, Planner, make_plan

ROW_BYTES = 16
"""TMA: global row pitch and base address are multiples of 16 bytes."""

# Looked up once, for the sake of repeated calls; see `dispatch_is_intercepted`.
_is_grad_enabled = torch.is_grad_enabled
_is_compiling, _is_profiling = torch.compiler.is_compiling, torch.autograd._profiler_enabled
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_functorch_level, _is_tracing = torch._C._functorch.peek_interpreter_stack, torch._C._is_tracing

A = TypeVar("A")
"""The dataclass of an operation's arguments."""

FIRST_CALLS: contextvars.ContextVar["Callable[[Operation, Any], Any] | None"] = contextvars.ContextVar(
    "first calls", default=None
)
"""Finds the configuration of a problem that nobody has tuned; None: the chooser does."""


def dispatch_is_intercepted() -> bool:
    """Whether something traces or intercepts operators: `torch.compile`, export, modes, functorch, profiler, tangents.

    Otherwise, and unless the result needs a gradient, the dispatcher would do nothing but call `Operation.execute`, and
    take tens of microseconds for it.
    """
    return (
        _is_compiling()
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _functorch_level() is not None
        or _carries_tangents()
        or _is_tracing()
        or _is_profiling()
    )


def _carries_tangents() -> bool:
    """Whether a level of forward-mode differentiation is entered; torch has no other name for it."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def are_of_a_device(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors have nothing but numbers in a device's memory for the dispatcher to look at; the sign of a
    negated view is not in its memory."""
    return tensors[0].is_cuda and all(type(each) in PLAIN_TENSORS and not each.is_neg() for each in tensors)


def random_values(
    *shape: int, dtype: torch.dtype, device: str = "cpu", generator: torch.Generator | None = None
) -> torch.Tensor:
    """Normally distributed, of integers all values that there are; from torch's own generator without another."""
    where = {"device": device, "generator": generator}
    if dtype.is_floating_point:
        return torch.randn(*shape, dtype=torch.float32, **where).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype, **where)


_LIBRARY = torch.library.Library("cute_kernels", "FRAGMENT")


def define_operator(
    name: str, parameters: str, run: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]
) -> None:
    """Defines ``torch.ops.cute_kernels.<name>``: ``run`` computes below autograd, ``fake`` makes an empty result."""
    # Kernels read rows through TMA: a compiler must not hand them other strides than the program had.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _LIBRARY.define(f"{name}({parameters}) -> Tensor", tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cute_kernels::{name}", fake, lib=_LIBRARY)


def launch(executor: str, plan: Plan, operands: Operands) -> None:
    """Runs the kernels of a plan where `choose_backend` says: ``"kernel"``, ``"program"`` or ``"emulator"``."""
    if executor == "kernel":
        gpu.launch(plan, operands)
        return
    # Late, since launches on a GPU need neither the emulator nor its dependencies.
    import cute_kernels.operations.runtime.emulated as emulated

    (emulated.launch_in_program if executor == "program" else emulated.launch)(plan, operands)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A checked call, ready for `cute_kernels.operations.runtime`; ``output_shape`` is that of what the operation
    returns."""

    plan: Plan
    operands: Operands
    output_shape: tuple[int, ...]

    def result(self) -> torch.Tensor:
        """The output without the padding of its rows, contiguous: the operand's memory where there is none."""
        out = self.operands.out
        if out.shape[-1] != self.output_shape[-1]:
            out = out[..., : self.output_shape[-1]].contiguous()
        return out if out.shape == self.output_shape else out.view(self.output_shape)


class Operation(ABC, Generic[A]):
    """One operation, registered with torch as ``torch.ops.cute_kernels.<name>`` when it is made.

    Checking, preparation and dispatch live behind the operator, so that `torch.compile` sees one node and a direct call
    is checked all the same.

    Attributes:
        planner: what is registered of it for planning; its name is that of the operator.
        arguments: the dataclass of its arguments.
        scales: how its factors become one number, of each operand that is one.
        differentiable: names of the arguments that have a derivative, unless they or the result have 8 bits.
        rotated: the argument of which timed launches read one after another.
        repeated: its remembered calls.
    """

    planner: Planner
    arguments: type[A]
    scales: tuple[ScaleProduct, ...] = ()
    differentiable: tuple[str, ...]
    rotated: str

    def __init__(self) -> None:
        self.name = self.planner.operation
        self.table = ArgumentTable(self.arguments)
        self.repeated = RepeatedCalls(
            [Repeatable(name, row.role, row.operand or name) for name, row in self.table.rows.items()], self.scales
        )
        self._backend = list(self.table.rows).index("backend")
        define_operator(self.name, self.table.schema, self._run, self._fake)
        _LIBRARY.impl(self.name, self._autograd, "Autograd", with_keyset=True)

    # ---- what an operation says of itself ----------------------------------------------------------------------------
    @abstractmethod
    def problems(self, a: A) -> Iterator[Exception]:
        """Errors in types and extents that depend on each other; runs on fake tensors, too.

        Element types may be wrong ones, numbers of extents are right.
        """

    def check_values(self, a: A) -> None:
        """Checks numbers in host memory; not on fake tensors."""

    @abstractmethod
    def problem(self, a: A) -> Any:
        """Problem to be computed, as plans see it."""

    @abstractmethod
    def smallest(self, problem: Any) -> Any:
        """A problem that differs in how many rows or images there are, few, from one that has none."""

    @abstractmethod
    def smaller(self, problem: Any) -> Iterator[Any]:
        """Problems of the same kind that the emulator executes in seconds, those of least work first.

        They differ in what is an argument of a launch alone: one kernel may compute the problem and them.
        """

    @abstractmethod
    def example(self, problem: Any, device: str = "cpu") -> A:
        """Random arguments of a call that has this problem, its configuration left open."""

    @abstractmethod
    def shardings(self, shapes: Mapping[str, Shape], parts: int) -> Iterator[Sharding]:
        """How a call on DTensors may be divided. ``shapes``: of the tensors that are given, by argument; ``parts``:
        into which a dimension may be divided at most."""

    def variants(self, plan: Plan) -> list[Plan]:
        """Plans that a tuner tries beside a plan if it is the fastest of the candidates."""
        return []

    def tuned_problem(self, problem: Any) -> Any:
        """The problem that a tuned configuration is kept for."""
        return problem

    @abstractmethod
    def prepare(self, a: A, plan: Plan) -> Prepared:
        """Lays out the operands of checked arguments, output included."""

    @abstractmethod
    def reference(self, a: A) -> torch.Tensor:
        """The result in plain torch."""

    def reads(self, name: str, flat: tuple) -> tuple[str, ...]:
        """Names of the tensors whose numbers the derivative for one argument needs. ``name``: of the argument;
        ``flat``: arguments of the operator."""
        first, second, *_ = self.table.tensor_names  # a product's
        return {first: (second, "scale_a", "scale_b"), second: (first, "scale_a", "scale_b")}.get(name, ())

    @abstractmethod
    def gradients(self, a: A, grad: torch.Tensor, facts: Facts) -> dict[str, torch.Tensor]:
        """Derivatives in plain torch, which can be differentiated again; autograd converts their element types.

        ``a``: without the tensors that `reads` does not name; ``grad``: of the result; ``facts``: what is wanted, all
        of it `differentiable`, and of which shapes and types the tensors are.
        """

    @abstractmethod
    def output_shape(self, a: A) -> tuple[int, ...]:
        """Shape of the result."""

    @abstractmethod
    def output_dtype(self, a: A) -> torch.dtype:
        """Element type of the result."""

    def converted(self, values: tuple) -> tuple:
        """Arguments with the same result, of another type where calls with these as they are cannot be remembered."""
        return values

    # ---- the way of a call -------------------------------------------------------------------------------------------
    def call(self, values: tuple) -> torch.Tensor:
        """A call with arguments in the order of the table."""
        direct = values[self._backend] == "auto" and not dispatch_is_intercepted()
        if direct:
            gradients = _is_grad_enabled()
            out = self.repeated.run(values, gradients)
            if out is None and (converted := self.converted(values)) is not values:
                values = converted
                out = self.repeated.run(values, gradients)
            if out is not None:
                return out
        return self._first(direct, values)

    def _first(self, direct: bool, values: tuple) -> torch.Tensor:
        """A call that is not remembered; ``direct``: nothing intercepts operators, the dispatcher may be left out."""
        flat = self.table.encode(values)
        if direct:
            gradients = _is_grad_enabled()
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            if are_of_a_device(tensors):
                if gradients and any(tensor.requires_grad for tensor in tensors):
                    return _Differentiable.apply(self, None, *flat)
                return self.execute(self.arguments(*values))
        return getattr(torch.ops.cute_kernels, self.name)(*flat)

    def check(self, a: A) -> None:
        """Everything that can be told from the metadata of the tensors."""
        self.table.check(a, self.problems)

    def plan(self, a: A) -> Plan:
        """For a CUDA device that has a kernel, without a config with what was found fastest on its kind, if anything;
        otherwise for the architecture of the config, without one the first in the operation's `Planner`."""
        device, problem = next(iter(self.table.tensors_of(a)))[2].device, self.problem(a)
        if device.type != "cuda":
            return make_plan(problem, a.config)
        arch, sm_count = device_facts(torch.cuda.current_device() if device.index is None else device.index)
        config = self._tuned_config(problem, device) if a.config is None else a.config
        return make_plan(problem, config, arch, sm_count=sm_count)

    def _tuned_config(self, problem: Any, device: torch.device) -> Any:
        """The configuration that was found fastest on this kind of device, if any, or is found now."""
        tuned, tune = self.tuned_problem(problem), FIRST_CALLS.get()
        config = tuned_config(tuned, device)
        if config is not None or tune is None or torch.cuda.is_current_stream_capturing():  # a capture allows no timing
            return config
        with torch.cuda.device(device):
            return tune(self, tuned)

    def given(self, **named: Any) -> A:
        """Arguments by name; the others are left out."""
        return self.arguments(**(self.table.defaults | named))

    def prepared(self, **given: Any) -> Prepared:
        """Everything of a call but the launch: its plan and its operands. ``given``: arguments by name; the others are
        left out. Raises TypeError, ValueError: as a call does."""
        a = self.given(**given)
        self.check(a)
        return self.prepare(a, self.plan(a))

    def execute(self, a: A) -> torch.Tensor:
        """Checks, computes, and remembers the call if it was made on a GPU; of no rows nothing is launched.

        Of a step of a training, whose numbers are new in every call, it remembers the plan alone, for equal facts.
        """
        facts = repeat.call_facts([getattr(a, name) for name in self.table.rows]) if DERIVED.keeps_nothing else None
        kept = self.repeated.plans.get(facts)
        if kept is not None:
            self.check_values(a)
            prepared = self.prepare(a, kept.plan)
            kept.launch(prepared.operands)
            return prepared.result()
        self.check(a)
        self.check_values(a)
        first = next(iter(self.table.tensors_of(a)))[2]
        executor = choose_backend(first.device, a.backend)
        if not first.numel():
            if a.config is not None:
                make_plan(self.smallest(self.problem(a)), a.config)
            return first.new_empty(self.output_shape(a), dtype=self.output_dtype(a))
        if executor == "reference":
            if a.config is not None:
                # A call that no kernel could run must not pass where it is tried without one.
                make_plan(self.problem(a), a.config)
            return self.reference(a)
        prepared = self.prepare(a, self.plan(a))
        launch(executor, prepared.plan, prepared.operands)
        out = prepared.result()
        if executor == "kernel" and facts is not None:
            self.repeated.plans[facts] = repeat.KeptPlan(prepared.plan, tuple(vars(prepared.operands)))
        elif executor == "kernel":
            values = {name: getattr(a, name) for name in self.table.rows}
            self.repeated.put(values, prepared.plan, prepared.operands, out)
        return out

    # ---- the operator ------------------------------------------------------------------------------------------------
    def _run(self, *flat: Any) -> torch.Tensor:
        values = self.table.decode(flat)
        training = in_autograd_function()
        if values[self._backend] == "auto" and not training:
            out = self.repeated.run(values, False)  # gradients are the dispatcher's matter here
            if out is not None:
                return out
        # A weight that trains is another tensor in every step: remembering it takes longer than the call, and comparing
        # it, where its like is remembered, would make the host wait.
        with DERIVED.keep_nothing() if training else contextlib.nullcontext():
            return self.execute(self.arguments(*values))

    def _fake(self, *flat: Any) -> torch.Tensor:
        # DTensor asks for the type of a result before it asks for shardings.
        register_if_used(self.name, self.shardings)
        a = self.arguments(*self.table.decode(flat))
        self.check(a)
        first = next(iter(self.table.tensors_of(a)))[2]
        return first.new_empty(self.output_shape(a), dtype=self.output_dtype(a))

    def _autograd(self, keyset: torch._C.DispatchKeySet, *flat: Any) -> torch.Tensor:
        """Refuses tangents, which the dispatcher would take for zero; notes what `gradients` needs where it is wanted.
        """
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        if _carries_tangents() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise NotImplementedError(
                f"cute_kernels.{self.name} has no forward-mode derivative: call it without tangents (jvp, jacfwd, "
                "dual numbers), or differentiate the same in plain torch"
            )
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return self._below_autograd(keyset, *flat)
        # The dispatcher is inside one level of `torch.func` here, as the kernels of torch's own operators are.
        inside = enable_single_level_autograd_function if _functorch_level() is not None else contextlib.nullcontext
        with inside():
            return _Differentiable.apply(self, keyset, *flat)

    def _below_autograd(self, keyset: torch._C.DispatchKeySet | None, *flat: Any) -> torch.Tensor:
        """Computes; ``keyset``: None where it is known that the dispatcher may be left out."""
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        with torch._C._AutoDispatchBelowAutograd():
            if keyset is None or (are_of_a_device(tensors) and not dispatch_is_intercepted()):
                return self._run(*flat)
            operator = getattr(torch.ops.cute_kernels, self.name).default
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *flat)


class _Differentiable(torch.autograd.function._SingleLevelFunction):
    """A call whose derivatives are `Operation.gradients`."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, keyset: torch._C.DispatchKeySet | None, *flat: Any) -> torch.Tensor:
        given = dict(zip(operation.table.tensor_names, flat))
        wanted = [name for name, value in given.items() if value is not None and value.requires_grad]
        read = {name for each in wanted for name in operation.reads(each, flat)}
        kept = [name for name in given if name in read]
        ctx.save_for_backward(*(given[name] for name in kept))
        ctx.operation, ctx.kept, ctx.others = operation, kept, flat[len(given) :]
        ctx.facts = {name: Fact(value.shape, value.dtype) for name, value in given.items() if value is not None}
        return operation._below_autograd(keyset, *flat).detach()  # a view from here could not be written to in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        operation, names = ctx.operation, ctx.operation.table.tensor_names
        facts = Facts(ctx.facts, frozenset(name for name, needed in zip(names, ctx.needs_input_grad[2:]) if needed))
        for name in facts.wanted:
            dtype = facts[name].dtype
            if name not in operation.differentiable or dtype.itemsize == 1 or grad.dtype.itemsize == 1:
                raise NotImplementedError(
                    f"cute_kernels.{operation.name} has no derivative for {name} of {dtype} with a result of "
                    f"{grad.dtype}: must be {' or '.join(operation.differentiable)} of 16 or 32 bits; call it under "
                    "torch.no_grad()"
                )
        saved = dict(zip(ctx.kept, ctx.saved_tensors))
        values = operation.table.decode((*(saved.get(name) for name in names), *ctx.others))
        found = operation.gradients(operation.arguments(*values), grad, facts)
        gradients = [found[name] if name in facts.wanted else None for name in names]
        return None, None, *gradients, *[None] * len(ctx.others)
