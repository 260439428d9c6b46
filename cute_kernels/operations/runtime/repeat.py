"""Repeated calls: what depends only on shapes and on a model's constants is looked up, not worked out again.

The first call with some constants, shapes and configuration checks, plans, compiles and prepares its operands. What it
found is remembered here, and the next such call allocates the output and launches. A remembered call is used only on
the stream and device where it was made, and only while its constants are the same objects with the same memory, version
counter, shape and strides. The rules of `cute_kernels.operations.runtime.constants` hold here too: constants made in
inference mode are never remembered, and nothing is taken from here while a CUDA graph is captured.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cute_kernels.common import forks
from cute_kernels.operations.runtime import gpu
from cute_kernels.operations.runtime.constants import DERIVED, PEFT, Source
from cute_kernels.operations.runtime.operands import Operands, Picker, picker
from cute_kernels.plan import Plan

Role = Literal["varies", "constant", "scale", "static"]

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types without an override of what operators do."""

_CAPACITY = 1024
_ALIGNED = 256
"""Multiple of bytes that tells enough of an address: that of torch's allocations."""
_HOST = -1
"""`torch.Tensor.get_device` of a tensor in host memory."""


def _empty_strided_on_device(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


# Memory is allocated as code that torch.compile generates does it, on the current device: through the dispatcher that
# takes about twice as long. CPU builds of torch lack the last three.
_empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided_on_device)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_TENSOR_GUARDS = getattr(torch._C._dynamo.guards, "TensorGuards", None)


@dataclass(frozen=True)
class Repeatable:
    """One argument of an operation, as repeated calls see it."""

    name: str  # of the argument
    # ``"varies"``: a tensor that differs from call to call, and is an operand as it is; ``"constant"``: a tensor of the
    # model, found again by its identity, from which operands were made once; ``"scale"``: a factor, None, a number, one
    # number in memory, or a tensor of more of them, which is an operand as it is; ``"static"``: anything else that the
    # result depends on, found by its type and value
    role: Role
    operand: str  # the operand that a tensor is, or gives


@dataclass(frozen=True)
class ScaleProduct:
    """How those factors of a call that are one number become one: in Python, or as a tensor where one is in memory."""

    factors: tuple[str, ...]  # names of the arguments
    # which one takes it; absent where every factor is a tensor of more than one element, or nothing is multiplied
    operand: str
    # ``(factor, ...) -> float``, None in place of what is no one number; raises ValueError or TypeError
    numbers: Callable[..., float]
    tensors: Callable[..., torch.Tensor]  # ``(factor, ...) -> tensor`` of one element, likewise


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RepeatedCall:
    """One remembered call: what has to be as it was, and what is left to do."""

    types: tuple[type, ...]  # of the arguments
    # static, given: picks arguments that are found by their values, and these
    static: Picker
    given: tuple
    # device, stream: where it launches
    device: int
    stream: int
    # tensors, facts, same: picks arguments that are tensors; `_facts` of each; and whether others have the same, in one
    # call
    tensors: Picker
    facts: list[tuple]
    same: Callable[..., bool]
    # of each tensor of the model its place among the arguments, identity, address and version
    constants: tuple[tuple[int, int, int, int], ...]
    varying: tuple[int, ...]  # places of all other tensors
    # generation, then: of `DERIVED`, and the constants as it compares them
    generation: int
    then: tuple[Source, ...]
    # of each argument that is an operand as it is its place, and what its address is a multiple of
    operands: tuple[tuple[int, int], ...]
    # of each number that is passed by value, what picks the factors, and what makes it of them
    numbers: tuple[tuple[Picker, Callable[..., float]], ...]
    # make the other operands from the arguments: tensors that are looked up, or live for the call
    made: tuple[Callable[[tuple], torch.Tensor], ...]
    out: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # size, strides and type of the output
    # takes addresses and numbers in this order: operands, numbers, made, output
    launch: Callable[[Sequence[Any]], None]
    kept: tuple[torch.Tensor, ...]  # tensors that the launch reads and that nobody else keeps

    def run(self, values: tuple, gradients: bool) -> torch.Tensor | None:
        """Launches, or returns None where something is not as it was."""
        if tuple(map(type, values)) != self.types or self.static(values) != self.given:
            return None
        for place, number, address, version in self.constants:
            tensor = values[place]
            if id(tensor) != number or tensor.data_ptr() != address or tensor._version != version:
                return None
        for place in self.varying:
            if values[place].is_nested:  # by which `same` would end the process
                return None
        tensors, device = self.tensors(values), self.device
        if not self.same(*tensors) and list(map(_facts, tensors)) != self.facts:
            return None
        if _current_stream(device) != self.stream or _current_device() != device or _is_capturing():
            return None
        if DERIVED.generation != self.generation or (gradients and any(tensor.requires_grad for tensor in tensors)):
            return None
        if DERIVED.compares_on_gpu or PEFT in sys.modules:
            if not DERIVED.are_unchanged(self.then, *(values[place] for place, *_ in self.constants)):
                return None
        arguments: list[Any] = []
        for place, alignment in self.operands:
            address = values[place].data_ptr()
            if address % alignment:
                return None
            arguments.append(address)
        for factors, number in self.numbers:
            arguments.append(number(*factors(values)))
        made = [make(values) for make in self.made] if self.made else []  # alive until the launch is in the queue
        for tensor in made:
            arguments.append(tensor.data_ptr())
        out = _empty_strided(*self.out)
        arguments.append(out.data_ptr())
        self.launch(arguments)
        return out


class KeptPlan:
    """A plan, and its launch with nothing left to look up. ``names``: of all operands that it will be given, in order,
    a tensor first."""

    def __init__(self, plan: Plan, names: Sequence[str]) -> None:
        self.plan, self._names = plan, (*names, "stream")

    @functools.cached_property
    def _launch(self) -> Callable[[Sequence[Any]], None]:
        return _launch(self.plan, self._names, {})

    def launch(self, operands: Operands) -> None:
        """`gpu.launch` on the current stream, of operands that the plan knows."""
        device = next(iter(vars(operands).values())).get_device()
        with contextlib.nullcontext() if device == _current_device() else torch.cuda.device(device):
            self._launch((*operands.addresses().values(), _current_stream(device)))


class KeptPlans(dict):
    """Plans of checked calls, no more than `_CAPACITY`."""

    def __setitem__(self, key: tuple, plan: KeptPlan) -> None:
        if len(self) >= _CAPACITY:
            self.clear()
        super().__setitem__(key, plan)


def call_facts(values: Sequence[Any]) -> tuple | None:
    """Facts of arguments from which alone they are checked and planned, their numbers aside; None of no strided one."""
    facts: list[Any] = [torch.cuda.current_device() if torch.cuda.is_initialized() else None]
    for value in values:
        if not isinstance(value, torch.Tensor):
            facts += type(value), value
        elif value.is_nested or value.layout is not torch.strided:
            return None
        else:
            facts += _facts(value), value.data_ptr() % _ALIGNED
    return tuple(facts)


class RepeatedCalls:
    """Remembered calls of one operation. ``calls``: by everything that tells one from another and is not the address or
    the contents of a tensor; ``plans``: of calls whose constants change all the time, by their `call_facts`."""

    def __init__(self, arguments: Sequence[Repeatable], scales: Sequence[ScaleProduct] = ()) -> None:
        self._arguments, self._scales = tuple(arguments), tuple(scales)
        self._constants = picker([i for i, a in enumerate(arguments) if a.role == "constant"])
        self._static = picker([i for i, a in enumerate(arguments) if a.role == "static"])
        self._main = next((i for i, a in enumerate(arguments) if a.role == "constant"), 1)
        self.recent: dict[int, RepeatedCall] = {}
        self._varying: dict[tuple[type, ...], Picker] = {}
        self.calls: dict[tuple, RepeatedCall] = {}
        self.plans = KeptPlans()
        self._lock = forks.lock()  # a death inside a locked section may forget a call

    def run(self, values: tuple, gradients: bool) -> torch.Tensor | None:
        """Launches a remembered call, or returns None if it has to be made the long way.

        Takes the operation's arguments unchecked, whatever they are, and leaves it to the long way to say what is wrong
        with them; only factors that are no legal numbers raise here. ``gradients`` refuses tensors that require them.
        """
        main = id(values[self._main])
        call = self.recent.get(main)
        if call is not None:
            out = call.run(values, gradients)
            if out is not None:
                return out
        types = tuple(map(type, values))
        pick = self._varying.get(types)
        if pick is None:
            return None
        varying = pick(values)
        device = varying[0].get_device()
        if device == _HOST or any(tensor.is_nested for tensor in varying):  # which have no shape
            return None
        call = self.calls.get(self._key(types, values, varying, _current_stream(device)))
        if call is None:
            return None
        if len(self.recent) >= _CAPACITY:
            self.recent.clear()
        self.recent[main] = call
        return call.run(values, gradients)

    def clear(self) -> None:
        """Every call is made the long way again."""
        with self._lock:
            self.calls.clear()
            self.recent.clear()
            self._varying.clear()
            self.plans.clear()

    def put(
        self,
        values: Mapping[str, Any],
        plan: Plan,
        operands: Operands,
        out: torch.Tensor,
    ) -> None:
        """Remembers a call that was just made the long way on the current stream, if it may be made again."""
        if torch.cuda.is_current_stream_capturing():
            return  # memory of a graph's own pool must not outlive the graph
        given = {i: a for i, a in enumerate(self._arguments) if isinstance(values[a.name], torch.Tensor)}
        flat = tuple(values[a.name] for a in self._arguments)
        if not _may_be_repeated(given, flat, operands, out):
            return
        stream = torch.cuda.current_stream(out.device).cuda_stream
        types = tuple(map(type, flat))
        varying = picker([i for i, a in given.items() if a.role != "constant"])
        key = self._key(types, flat, varying(flat), stream)

        main = id(flat[self._main])

        def forget(_: Any, calls: dict = self.calls, recent: dict = self.recent) -> None:
            calls.pop(key, None)
            recent.pop(main, None)  # even a replaced call: the id will be used again

        call = self._remember(given, flat, plan, operands, out, stream=stream, forget=forget)
        with self._lock:
            if len(self.calls) >= _CAPACITY:
                self.clear()
            self._varying[types] = varying
            self.calls[key] = call

    def _key(self, types: tuple, values: tuple, varying: tuple, stream: int) -> tuple:
        """Key of values and types: an argument of another type, bool among them, is illegal and may be equal."""
        key = [types, varying[0].get_device(), stream, self._static(values), *map(id, self._constants(values))]
        for tensor in varying:
            key += tensor.shape, tensor.dtype
        return tuple(key)

    def _remember(
        self, given: Mapping[int, Repeatable], values: tuple, plan: Plan, operands: Operands, out: torch.Tensor, *,
        stream: int, forget: Callable[[Any], None]
    ) -> RepeatedCall:
        """``given``: arguments that are tensors, by their places among ``values``."""
        as_is = {i: a.operand for i, a in given.items() if _is_operand(a, values[i])}
        constants = [i for i, a in given.items() if a.role == "constant"]
        made: list[tuple[str, Callable[[tuple], torch.Tensor]]] = []
        numbers = {}
        for scale, factors in self._products(values, plan):
            if any(isinstance(factor, torch.Tensor) for factor in factors(values)):
                made.append((scale.operand, _multiplied(factors, scale.tensors)))
            else:
                numbers[scale.operand] = factors, scale.numbers
        made += [(name, _scratch(getattr(operands, name))) for name in plan.scratch]
        parameters = [*as_is.values(), *numbers, *(name for name, _ in made), "out"]
        fixed = {name: value for name, value in operands.addresses().items() if name not in parameters}
        alignments = {o.name: o.alignment for o in plan.operands if o.kind == "pointer"}
        # What was made for this call has to live as long as it; constants themselves must be able to die.
        own = {id(value) for value in values}
        kept = [t for name, t in operands.tensors().items() if name in fixed and id(t) not in own]
        tensors = picker(list(given))
        return RepeatedCall(
            types=tuple(map(type, values)),
            static=self._static,
            given=self._static(values),
            device=out.get_device(),
            stream=stream,
            tensors=tensors,
            facts=[_facts(tensor) for tensor in tensors(values)],
            same=_same(tensors(values)),
            constants=tuple((i, id(values[i]), values[i].data_ptr(), values[i]._version) for i in constants),
            varying=tuple(i for i in given if i not in constants),
            generation=DERIVED.generation,
            then=tuple(Source(values[i], forget) for i in constants),
            operands=tuple((i, alignments[name]) for i, name in as_is.items()),
            numbers=tuple(numbers.values()),
            made=tuple(make for _, make in made),
            out=_memory(out),
            launch=_launch(plan, parameters, fixed | {"stream": stream}),
            kept=tuple(kept),
        )

    def _products(self, values: tuple, plan: Plan) -> Iterator[tuple[ScaleProduct, Picker]]:
        """Products of scales that the plan has an operand for, each with what picks its factors from the values."""
        present = {operand.name for operand in plan.operands if operand.present}
        for scale in self._scales:
            factors = [i for i, a in enumerate(self._arguments) if a.name in scale.factors]
            places = [None if isinstance(values[i], torch.Tensor) and values[i].numel() != 1 else i for i in factors]
            if scale.operand in present and any(place is not None for place in places):
                yield scale, _numbers_at(places)


def _is_operand(argument: Repeatable, value: torch.Tensor) -> bool:
    """Whether the kernel reads the tensor as it is."""
    return argument.role == "varies" or (argument.role == "scale" and value.numel() != 1)


def _may_be_repeated(given: Mapping[int, Repeatable], values: tuple, operands: Operands, out: torch.Tensor) -> bool:
    """Whether nothing was copied, as an output with padded rows is, too, and all that is constant can be followed."""
    if out.data_ptr() != operands.out.data_ptr():
        return False
    for i, argument in given.items():
        value = values[i]
        if type(value) not in PLAIN_TENSORS or (argument.role == "constant" and value.is_inference()):
            return False
        if _is_operand(argument, value) and getattr(operands, argument.operand).data_ptr() != value.data_ptr():
            return False
    return True


def _numbers_at(places: Sequence[int | None]) -> Picker:
    """Gives the values at these places, None without one."""
    if None not in places:
        return picker(places)
    return lambda values: tuple([None if place is None else values[place] for place in places])


def _multiplied(factors: Picker, tensors: Callable[..., torch.Tensor]) -> Callable[[tuple], torch.Tensor]:
    return lambda values: tensors(*factors(values))


def _memory(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _scratch(tensor: torch.Tensor) -> Callable[[tuple], torch.Tensor]:
    memory = _memory(tensor)
    return lambda _: _empty_strided(*memory)


def _launch(plan: Plan, parameters: Sequence[str], constants: Mapping[str, Any]) -> Callable[[Sequence[Any]], None]:
    """The kernels of a plan in turn, as a function of the parameters."""
    launches = [gpu.bound_launch(kernel).with_constants(parameters, **constants) for kernel in plan.launches]

    def in_turn(values: Sequence[Any]) -> None:
        for launch in launches:
            launch(values)

    return launches[0] if len(launches) == 1 else in_turn


def _facts(tensor: torch.Tensor) -> tuple:
    """Facts that two tensors share that a launch takes for each other; none of one without strides."""
    if tensor.layout is not torch.strided:
        return ()
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_neg()


def _same(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether other tensors have the same `_facts` as these, in one call.

    The check of torch.compile's guards, which also compares the thread's dispatch state: where it says no, the tensors
    may be equal in what counts here. It says no of any in a version of torch that has another such check.
    """
    if _TENSOR_GUARDS is None:
        return _never
    try:
        return _TENSOR_GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (TypeError, RuntimeError, SystemError):
        return _never


def _never(*_: torch.Tensor) -> bool:
    return False
