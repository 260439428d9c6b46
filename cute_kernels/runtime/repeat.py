"""Repeated calls: what depends only on shapes and on a model's constants is looked up, not worked out again.

The first call with some constants, shapes and configuration checks, plans, compiles and prepares its operands. What it
found is remembered here, and the next such call allocates the output and launches. A remembered call is used only on
the stream and device where it was made, and only while its constants are the same objects with the same memory, version
counter, shape and strides. The rules of `cute_kernels.runtime.constants` hold here too: constants made in inference
mode are never remembered, and nothing is taken from here while a CUDA graph is captured.

Such a call takes less than 10 us of Python, of which every loop and every call of a function would be a visible part.
So both functions that it passes through are generated, as `dataclasses` generates methods: the one that looks a call up
from the operation's arguments, and the one that launches it from what is present in that call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cute_kernels import forks
from cute_kernels.plan import Plan
from cute_kernels.runtime import gpu
from cute_kernels.runtime.constants import DERIVED, PEFT
from cute_kernels.runtime.operands import Operands
from cute_kernels.runtime.sources import Source

Role = Literal["varies", "constant", "prepared", "derived", "scale", "static", "word", "number", "ignored"]

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types without an override of what operators do."""

_CAPACITY = 1024

_BY_VALUE = {"word": "str", "number": "int"}
"""Roles of what is found by its value, and the one type that it has."""


@dataclass(frozen=True)
class Repeatable:
    """One argument of an operation, as repeated calls see it.

    Attributes:
        name: of the argument.
        role: ``"varies"``: a tensor that differs from call to call, and is an operand as it is; ``"constant"``: a
            tensor of the model, found again by its identity, from which operands were made once; ``"prepared"``: one
            that this package made itself, whose shape and strides nobody changes in place, so that they are not
            compared in every call; ``"derived"``: a tensor from which an operand is looked up in every call;
            ``"scale"``: a factor, None, a number, one number in memory, or a tensor of more of them, which is an
            operand as it is; ``"static"``: anything else
            that the result depends on, found by its identity; ``"word"`` and ``"number"``: a `str` or an `int`
            likewise, found by its value, since the dispatcher makes a new object for every call; ``"ignored"``: of no
            influence.
        optional: whether a tensor may be None.
        operand: the operand that a tensor is, or gives.
    """

    name: str
    role: Role
    optional: bool = False
    operand: str = ""

    @property
    def kept(self) -> bool:
        """Whether it is found again by its identity, memory and version."""
        return self.role in ("constant", "prepared")


@dataclass(frozen=True)
class ScaleProduct:
    """How those factors of a call that are one number become one: in Python, or as a tensor where one is in memory.

    Attributes:
        operand: which one takes it; absent where every factor is a tensor of more than one element.
        numbers: ``(factor, ...) -> float``, None in place of what is no one number; raises ValueError or TypeError.
        tensors: ``(factor, ...) -> tensor`` of one element, likewise.
    """

    operand: str
    numbers: Callable[..., float]
    tensors: Callable[..., torch.Tensor]


class RepeatedCalls:
    """Remembered calls of one operation.

    Attributes:
        run: ``(*arguments, gradients) -> output or None``: launches a remembered call, or returns None if it has to be
            made the long way. Takes the operation's arguments unchecked, whatever they are, and leaves it to the long
            way to say what is wrong with them; only factors that are no legal numbers raise here. ``gradients`` refuses
            tensors that require them.
        calls: by key.
        recent: the last call with each constant by which calls are looked for first, by the constant's identity; takes
            what `run` takes, and returns None where the call is another one, which `run` may know.
    """

    def __init__(self, arguments: Sequence[Repeatable], scales: ScaleProduct | None = None) -> None:
        self._arguments, self._scales = tuple(arguments), scales
        self.calls: dict[Hashable, Callable[..., torch.Tensor | None]] = {}
        self.recent: dict[int, Callable[..., torch.Tensor | None]] = {}
        self._lock = forks.lock()  # a death inside a locked section may forget a call
        names = {"calls": self.calls, "recent": self.recent}
        self.run: Callable[..., torch.Tensor | None] = _generate(*_finder(self._arguments), names)
        self._key: Callable[..., tuple] = _generate(*_key_function(self._arguments), {})

    def clear(self) -> None:
        """Every call is made the long way again."""
        with self._lock:
            self.calls.clear()
            self.recent.clear()

    def put(
        self,
        values: Mapping[str, Any],
        plan: Plan,
        operands: Operands,
        out: torch.Tensor,
        derive: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    ) -> None:
        """Remembers a call that was just made the long way on the current stream, if it may be made again.

        Args:
            values: the operation's arguments by name.
            plan, operands: of the launch.
            out: what the call returned.
            derive: of each derived argument, what makes its operand.
        """
        given = [a for a in self._arguments if isinstance(values[a.name], torch.Tensor)]
        constants = [a for a in given if a.kept]
        vectors = [a for a in given if a.role == "scale" and values[a.name].numel() != 1]
        copied = any(
            getattr(operands, a.operand).data_ptr() != values[a.name].data_ptr()
            for a in given
            if a.role == "varies" or a in vectors
        )
        # An output with padded rows is copied, too. Memory of a graph's own pool must not outlive the graph.
        if copied or out.data_ptr() != operands.out.data_ptr() or torch.cuda.is_current_stream_capturing():
            return
        if any(values[a.name].is_inference() for a in constants):
            return
        if not all(type(values[a.name]) in PLAIN_TENSORS for a in given):
            return
        device, stream = out.get_device(), torch.cuda.current_stream(out.device).cuda_stream
        key = self._key(**values, device=device, stream=stream)

        found_by = _recent(self._arguments)
        main = None if found_by is None else id(values[found_by.name])

        def forget(_: Any, calls: dict = self.calls, recent: dict = self.recent) -> None:
            calls.pop(key, None)
            recent.pop(main, None)  # even a replaced call: the id will be used again

        shape = _Shape(
            present=frozenset(a.name for a in given),
            dense=frozenset(a.name for a in constants if values[a.name].is_contiguous()),
            vectors=frozenset(a.name for a in vectors),
            last=frozenset(a.name for a in given if a.role == "varies" and not values[a.name].is_contiguous()),
            scratch=plan.scratch,
            alignments=tuple((o.name, o.alignment) for o in plan.operands if o.kind == "pointer"),
        )
        source, parameters = _launcher(self._arguments, self._scales, shape)
        constant_operands = {
            name: value for name, value in operands.addresses().items() if name not in parameters
        }
        # What was made for this call has to live as long as it; constants themselves must be able to die.
        own = {id(value) for value in values.values()}
        made = [
            tensor
            for name, tensor in operands.tensors().items()
            if name in constant_operands and id(tensor) not in own
        ]
        static = [values[a.name] for a in self._arguments if a.role == "static"]
        launches = [
            gpu.bound_launch(kernel).with_constants(parameters, **constant_operands, stream=stream)
            for kernel in plan.launches
        ]
        namespace: dict[str, Any] = {
            "launch": launches[0] if len(launches) == 1 else functools.partial(_in_turn, launches),
            "device": device,
            "stream": stream,
            **_memory("out", out),
            "generation": DERIVED.generation,
            "same": _same([values[name] for name in _guarded(self._arguments, shape)]),
            "keep": (made, static),
            "then": [Source(values[a.name], forget) for a in constants],
        }
        if self._scales is not None:
            namespace |= {"combine_numbers": self._scales.numbers, "combine_tensors": self._scales.tensors}
        namespace |= {f"derive_{name}": function for name, function in derive.items()}
        namespace |= {f"{a.name}_shape": values[a.name].shape for a in vectors}
        scratch = {name: getattr(operands, name) for name in plan.scratch}
        for name, tensor in scratch.items():
            namespace |= _memory(name, tensor)
        for a in constants:
            tensor = values[a.name]
            stamp = {"id": id(tensor), "pointer": tensor.data_ptr(), "version": tensor._version}
            stamp |= {"shape": tensor.shape, "stride": tensor.stride()}
            namespace |= {f"{a.name}_{what}": value for what, value in stamp.items()}
        for a in self._arguments:
            value = values[a.name]
            if a.role in ("varies", "derived") and value is not None:
                namespace |= {f"{a.name}_shape": value.shape, f"{a.name}_dtype": value.dtype}
            elif a.role in ("static", "word", "number"):
                namespace[f"{a.name}_given"] = value
            elif a.role == "scale":
                namespace[f"{a.name}_type"] = type(value)
        call = _generate(source, "call", namespace)
        with self._lock:
            if len(self.calls) >= _CAPACITY:
                self.clear()
            self.calls[key] = call


def _memory(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Size, strides and type of what every call allocates for this contiguous tensor, by names in generated code."""
    return {f"{name}_size": tuple(tensor.shape), f"{name}_step": tensor.stride(), f"{name}_type": tensor.dtype}


def _same(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether other tensors are of the same types, shapes, strides, element types and devices as these, in one call.

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


@dataclass(frozen=True)
class _Shape:
    """Key of the code of a remembered call: what it depends on.

    Tensors that are there, constants that are contiguous, factors that are tensors of more than one element, tensors
    whose channels are last in memory, operands that live for a call.
    """

    present: frozenset[str]
    dense: frozenset[str]
    vectors: frozenset[str]
    last: frozenset[str]
    scratch: tuple[str, ...]
    alignments: tuple[tuple[str, int], ...]


# --- code ------------------------------------------------------------------------------------------------------------

def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


_TENSOR_GUARDS = getattr(torch._C._dynamo.guards, "TensorGuards", None)

# What generated code uses. Looked up once: attribute by attribute they cost a call half a microsecond. CPU builds of
# torch lack the last three. Memory is allocated as code that torch.compile generates does it, on the current device:
# through the dispatcher that takes about twice as long.
_SHARED = {
    "PLAIN": PLAIN_TENSORS,
    "Tensor": torch.Tensor,
    "DERIVED": DERIVED,
    "MODULES": sys.modules,
    "CHANNELS_LAST": torch.channels_last,
    "FP32": torch.float32,
    "empty_strided": getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided),
    "current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
    "current_device": getattr(torch._C, "_cuda_getDevice", None),
    "is_capturing": getattr(torch._C, "_cuda_isCurrentStreamCapturing", None),
}


def _in_turn(launches: Sequence[Callable[..., None]], *values: Any) -> None:
    for launch in launches:
        launch(*values)


@functools.cache
def _compiled(source: str) -> Any:
    return compile(source, "<repeated call>", "exec")


def _generate(source: str, name: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """The function ``name`` of the source, whose global names are these."""
    names = _SHARED | namespace
    exec(_compiled(source), names)  # noqa: S102
    return names[name]


def _key(arguments: Sequence[Repeatable]) -> str:
    parts = ["device", "stream"]
    for a in arguments:
        if a.kept or a.role == "static":
            parts.append(f"id({a.name})")
        elif a.role in _BY_VALUE:
            # Of another type, bool among them, an argument is illegal and not to be taken for an equal one.
            parts.append(f"{a.name} if type({a.name}) is {_BY_VALUE[a.role]} else None")
        elif a.role == "scale":
            parts.append(f"type({a.name})")
        elif a.role in ("varies", "derived"):
            absent = f"None if {a.name} is None else " if a.optional else ""
            parts += [f"{absent}{a.name}.shape", f"{absent}{a.name}.dtype"]
    return f"({', '.join(parts)})"


def _key_function(arguments: Sequence[Repeatable]) -> tuple[str, str]:
    names = ", ".join(a.name for a in arguments)
    return f"def key({names}, device, stream):\n    return {_key(arguments)}\n", "key"


def _recent(arguments: Sequence[Repeatable]) -> Repeatable | None:
    """The constant by which the last call is found before any other is looked for; there may be none."""
    return next((a for a in arguments if a.role == "constant" and not a.optional), None)


def _finder(arguments: Sequence[Repeatable]) -> tuple[str, str]:
    """Source of `RepeatedCalls.run`. That of ``patch_embed`` begins:

    def run(x, weight, bias, pos_embed, pos_index, scale_a, scale_b, backend, config, gradients):
        call = recent.get(id(weight))
        if call is not None:
            out = call(x, weight, bias, pos_embed, pos_index, scale_a, scale_b, backend, config, gradients)
            if out is not None:
                return out
        if type(x) not in PLAIN or not x.is_cuda:
            return None
        if pos_index is not None and type(pos_index) not in PLAIN:
            return None
        device = x.get_device()
        stream = current_stream(device)
        call = calls.get((device, stream, x.shape, x.dtype, id(weight), ..., id(config)))
    """
    names = ", ".join(a.name for a in arguments)
    first, *others = (a for a in arguments if a.role in ("varies", "derived"))
    constant = _recent(arguments)
    lines = [f"def run({names}, gradients):"]
    if constant is not None:
        lines += [
            f"    call = recent.get(id({constant.name}))",
            "    if call is not None:",
            f"        out = call({names}, gradients)",
            "        if out is not None:",
            "            return out",
        ]
    lines += [f"    if type({first.name}) not in PLAIN or not {first.name}.is_cuda:", "        return None"]
    for a in others:
        there = f"{a.name} is not None and " if a.optional else ""
        lines += [f"    if {there}type({a.name}) not in PLAIN:", "        return None"]
    lines += [
        f"    device = {first.name}.get_device()",
        "    stream = current_stream(device)",
        f"    call = calls.get({_key(arguments)})",
        "    if call is None:",
        "        return None",
    ]
    if constant is not None:
        lines.append(f"    recent[id({constant.name})] = call")
    lines.append(f"    return call({names}, gradients)")
    return "\n".join(lines) + "\n", "run"


def _guarded(arguments: Sequence[Repeatable], shape: _Shape) -> list[str]:
    """Tensors whose types, shapes and strides are compared in one call, those that differ from call to call first."""
    roles = ("varies", "derived", "constant")
    return [a.name for role in roles for a in arguments if a.role == role and a.name in shape.present]


def _differs(a: Repeatable, shape: _Shape, in_key: bool, first: bool) -> list[str]:
    """Conditions that show that one of them differs, whatever the thread's dispatch state is.

    Types and shapes of what varies, and the device of the first, may be ``in_key`` already.
    """
    t = a.name
    if a.role == "constant":
        # Contiguous ones are not asked for their strides, which takes longest.
        strides = f"not {t}.is_contiguous()" if t in shape.dense else f"{t}.stride() != {t}_stride"
        return [f"{t}.shape != {t}_shape", strides]
    found = [f"type({t}) not in PLAIN", f"{t}.shape != {t}_shape", f"{t}.dtype is not {t}_dtype"]
    conditions = [] if in_key else found
    if not (in_key and first):
        conditions.append(f"{t}.get_device() != device")
    if a.role == "varies":
        layout = "memory_format=CHANNELS_LAST" if t in shape.last else ""
        conditions.append(f"not {t}.is_contiguous({layout})")
    return conditions


def _is_another(a: Repeatable, shape: _Shape, found_by: Repeatable | None) -> list[str]:
    """Conditions that show that an argument is none of the remembered call, in terms of its name."""
    t = a.name
    if a.kept and a == found_by:
        return []
    if a.kept:
        return [f"id({t}) != {t}_id" if t in shape.present else f"{t} is not None"]
    if a.role in ("varies", "derived"):
        return [] if t in shape.present else [f"{t} is not None"]
    if a.role in _BY_VALUE:
        return [f"type({t}) is not {_BY_VALUE[a.role]}", f"{t} != {t}_given"]
    return {"static": [f"{t} is not {t}_given"], "scale": [f"type({t}) is not {t}_type"]}.get(a.role, [])


@functools.lru_cache(maxsize=256)
def _launcher(
    arguments: tuple[Repeatable, ...], scales: ScaleProduct | None, shape: _Shape
) -> tuple[str, tuple[str, ...]]:
    """Source of a remembered call, and the parameters of its launch. Of ``patch_embed`` without an index, in parts:

    def call(x, weight, bias, pos_embed, pos_index, scale_a, scale_b, backend, config, gradients):
        if id(bias) != bias_id or ... or current_stream(device) != stream:
            return None
        if not same(x, weight, bias, pos_embed) and (type(x) not in PLAIN or x.shape != x_shape or ...):
            return None
        if (DERIVED.generation != generation or current_device() != device or is_capturing()
                or ((DERIVED.compares_on_gpu or 'peft' in MODULES)
                    and not DERIVED.are_unchanged(then, weight, bias, pos_embed))
                or weight.data_ptr() != weight_pointer or weight._version != weight_version or ...):
            return None
        at_x = x.data_ptr()
        if at_x % 16 or (gradients and x.requires_grad):
            return None
        _scale = combine_numbers(scale_a, scale_b)
        _out = empty_strided(out_size, out_step, out_type)
        launch(at_x, _scale, _out.data_ptr())
        return _out

    The first condition, that the call is this one, is left out where calls are found by their keys alone. The constant
    by which it was found is not compared again.
    """
    alignments = dict(shape.alignments)
    lines = [f"def call({', '.join(a.name for a in arguments)}, gradients):"]
    found_by = _recent(arguments)
    if found_by is not None:
        another = [condition for a in arguments for condition in _is_another(a, shape, found_by)]
        lines += _refuse([*another, "current_stream(device) != stream"])
    guarded, in_key = _guarded(arguments, shape), found_by is None
    compared = [a for a in arguments if a.name in guarded]
    differs = [word for a in compared for word in _differs(a, shape, in_key, a.name == guarded[0])]
    # What the key leaves is too little for a call that compares it all.
    once = "" if in_key else f"not same({', '.join(guarded)}) and "
    lines += [f"    if {once}({' or '.join(differs)}):", "        return None"]
    refusals = ["DERIVED.generation != generation", "current_device() != device", "is_capturing()"]
    kept = ", ".join(a.name for a in arguments if a.kept and a.name in shape.present)
    if kept:
        compared = f"DERIVED.compares_on_gpu or {PEFT!r} in MODULES"
        refusals.append(f"(({compared}) and not DERIVED.are_unchanged(then, {kept}))")
    differentiable: list[str] = []
    for a in (a for a in arguments if a.kept and a.name in shape.present):
        t = a.name
        refusals += [f"{t}.data_ptr() != {t}_pointer", f"{t}._version != {t}_version"]
        differentiable.append(f"{t}.requires_grad")
    lines += _refuse([*refusals, f"(gradients and ({' or '.join(differentiable)}))"] if differentiable else refusals)
    launched: list[tuple[str, str]] = []
    for a in (a for a in arguments if a.role == "varies" and a.name in shape.present):
        t = a.name
        refusals = [f"at_{t} % {alignments[a.operand]}", f"(gradients and {t}.requires_grad)"]
        lines += [f"    at_{t} = {t}.data_ptr()", *_refuse(refusals)]
        launched.append((a.operand, f"at_{t}"))
    for a in (a for a in arguments if a.role == "derived" and a.name in shape.present):
        t = a.name
        lines += _refuse([f"(gradients and {t}.requires_grad)"])
        lines.append(f"    from_{t} = derive_{t}({t})")
        launched.append((a.operand, f"from_{t}.data_ptr()"))
    for a in (a for a in arguments if a.name in shape.vectors):
        t = a.name
        lines += _refuse([
            f"type({t}) not in PLAIN", f"{t}.dtype is not FP32", f"{t}.shape != {t}_shape", f"{t}.is_neg()",
            f"not {t}.is_contiguous()", f"{t}.get_device() != device", f"(gradients and {t}.requires_grad)",
        ])  # fmt: skip
        lines += [f"    at_{t} = {t}.data_ptr()", *_refuse([f"at_{t} % {alignments[a.operand]}"])]
        launched.append((a.operand, f"at_{t}"))
    numbers = [a.name for a in arguments if a.role == "scale" and a.name not in shape.vectors]
    factors = [a.name if a.name in numbers else "None" for a in arguments if a.role == "scale"]
    in_memory = [name for name in numbers if name in shape.present]
    if scales is not None and numbers and not in_memory:
        lines.append(f"    _scale = combine_numbers({', '.join(factors)})")
        launched.append((scales.operand, "_scale"))
    elif scales is not None and numbers:
        for t in in_memory:
            lines += _refuse([
                f"{t}.dtype is not FP32", f"{t}.numel() != 1", f"{t}.get_device() != device",
                f"type({t}) not in PLAIN", f"(gradients and {t}.requires_grad)",
            ])  # fmt: skip
        lines.append(f"    _scale = combine_tensors({', '.join(factors)})")  # lives until the launch is in the queue
        launched.append((scales.operand, "_scale.data_ptr()"))
    for name in shape.scratch:
        lines.append(f"    _{name} = empty_strided({name}_size, {name}_step, {name}_type)")
        launched.append((name, f"_{name}.data_ptr()"))
    lines += [
        "    _out = empty_strided(out_size, out_step, out_type)",
        f"    launch({', '.join([value for _, value in launched] + ['_out.data_ptr()'])})",
        "    return _out",
    ]
    return "\n".join(lines) + "\n", tuple([name for name, _ in launched] + ["out"])


def _refuse(conditions: Sequence[str]) -> list[str]:
    return [f"    if {' or '.join(conditions)}:", "        return None"]
