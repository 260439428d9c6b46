"""`gemm`: its arguments, what they have to be, and what the kernel gets of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from cute_kernels import reference
from cute_kernels.config import ACTIVATIONS, Activation, GemmConfig, GemmProblem
from cute_kernels.dtypes import name_of
from cute_kernels.operations import arguments
from cute_kernels.operations.base import ROW_BYTES, Operation, Prepared, random_values
from cute_kernels.operations.sharding import Shape, Sharding
from cute_kernels.plan import GemmPlan
from cute_kernels.plan.registry import GEMM as PLANNER
from cute_kernels.runtime.constants import DERIVED
from cute_kernels.runtime.devices import Backend
from cute_kernels.runtime.operands import Operands

GROUPS = (1, 4, 8, 16)
"""Values of ``group_m`` that a tuner tries on the fastest candidate."""

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    backend: Backend = "auto",
    allow_tf32: bool = False,
    activation: Activation = "none",
) -> torch.Tensor:
    """``activation(a @ b.T + bias)``, in the layout of `torch.nn.functional.linear`, accumulated in FP32.

    The accumulator is rounded once per tensor-core instruction of 16 elements of K (8 of TF32); FP32 ``bias`` is added
    with one rounding, the activation is computed from operations that IEEE 754 rounds correctly, and the result is
    rounded once to ``out_dtype``: `cute_kernels.reference.gemm` says the same in plain torch, and what the ``split_k``
    of a config changes in the order of the additions. Of float32 operands the tensor core multiplies TF32,
    which has FP32's range and 11 significant bits: every element is rounded to the nearest one first, ties to even.

    Args:
        a: ``[M, K]`` or ``[B, M, K]`` bfloat16, float16 or, with ``allow_tf32``, float32, contiguous; K a
            multiple of 8, or of 4 in float32 (TMA reads rows of whole 16 bytes), at least that. A slice whose memory
            does not start on 16 bytes is copied. Of no rows nothing is launched.
        b: ``[N, K]`` of the same type, for all of a batch, or ``[B, N, K]``, no extent 0.
        bias: ``[N]`` BF16, FP16 or FP32, any stride, or None. It is converted to FP32 once and found again by object,
            memory, autograd's version counter and, as `cute_kernels.clear_cache` says, its numbers.
        out_dtype: bfloat16, float16 or float32; the type of ``a`` when None.
        config: tunables of the kernel, `Sm100GemmConfig`, `Sm90GemmConfig` or `Sm80GemmConfig`; None takes what
            `cute_kernels.tune_gemm` found for this problem, or chooses by size. The emulator runs the kernel of the
            config's architecture, SM100's without a config.
        backend: ``"auto"``: the compiled kernel for CUDA tensors, plain torch for CPU tensors. ``"emulator"``: the
            compiled PTX, executed on the CPU. ``"reference"``: plain torch on any device.
        allow_tf32: accepts float32 operands although 13 of their 24 significant bits are lost; of no effect on others.
        activation: ``"none"``, ``"relu"``, ``"relu_squared"``, ``"silu"`` (``x * sigmoid(x)``), ``"quick_gelu"`` (``x *
            sigmoid(1.702 x)``), ``"gelu"`` (GELU in its exact form) or ``"gelu_tanh"`` (in its tanh form, as
            `torch.nn.functional.gelu` with ``approximate="tanh"``). Of a sum x, the error of the last four is at most
            ``7e-4 |x|`` where ``out_dtype`` is bfloat16, a fifth of what rounding to it adds, and ``8e-7 |x|``
            elsewhere, at twice the cost.

    Returns:
        ``[M, N]`` or ``[B, M, N]`` in ``out_dtype``, contiguous. N whose rows are no multiple of 16 bytes costs a copy.
        There are no derivatives: asking for one raises NotImplementedError. Of DTensors it is a DTensor
        (`cute_kernels.operations.sharding`).

    Raises:
        TypeError: an argument of the wrong type or element type, float32 without ``allow_tf32`` among them.
        ValueError: a wrong shape, stride, device, backend or config value.
        NotImplementedError: a device without a kernel.
    """
    return GEMM.call((a, b, bias, out_dtype, backend, config, allow_tf32, activation))


@dataclass(frozen=True, eq=False)
class GemmArguments:
    """The table of arguments; what they mean is said at `gemm`."""

    a: torch.Tensor = arguments.tensor(*_TYPES, shapes=("[M, K]", "[B, M, K]"), dense=True, may_be_empty=True)
    b: torch.Tensor = arguments.tensor(*_TYPES, shapes=("[N, K]", "[B, N, K]"), dense=True)
    bias: torch.Tensor | None = arguments.tensor(*_TYPES, optional=True, role="derived")
    out_dtype: torch.dtype | None = arguments.plain("ScalarType? out_dtype", torch.dtype, optional=True)
    backend: Backend = arguments.backend()
    config: GemmConfig | None = arguments.config(PLANNER.codec)
    allow_tf32: bool = arguments.plain("bool allow_tf32=False", bool, default=False)
    activation: Activation = arguments.plain("str activation='none'", str, default="none")


class _Gemm(Operation[GemmArguments]):
    planner = PLANNER
    arguments = GemmArguments
    rotated = "a"

    def problems(self, args: GemmArguments) -> Iterator[Exception]:
        a, b, bias = args.a, args.b, args.bias
        if a.dtype is torch.float32 and not args.allow_tf32:
            yield TypeError(
                "a has dtype torch.float32, of which the tensor core would multiply 11 of 24 significant bits (TF32), "
                "allowed: torch.bfloat16, torch.float16, or torch.float32 with allow_tf32=True"
            )
        if a.dtype != b.dtype:
            yield TypeError(f"a has dtype {a.dtype} and b has dtype {b.dtype}: they must be equal")
        if args.activation not in ACTIVATIONS:
            yield ValueError(f"activation = {args.activation!r}, allowed: {', '.join(map(repr, ACTIVATIONS))}")
        if args.out_dtype is not None and args.out_dtype not in _TYPES:
            yield ValueError(f"out_dtype = {args.out_dtype}, allowed: {', '.join(map(str, _TYPES))}")
        if b.dim() > a.dim():
            yield ValueError(f"b has shape {list(b.shape)}, allowed beside a {list(a.shape)}: [N, K]")
        elif b.dim() == 3 and a.shape[0] != b.shape[0]:
            yield ValueError(f"a has B = {a.shape[0]} and b has B = {b.shape[0]}: they must be equal")
        n, k = b.shape[-2:]
        if a.shape[-1] != k:
            yield ValueError(f"a has K = {a.shape[-1]} and b has K = {k}: they must be equal")
        step = ROW_BYTES // a.itemsize if a.dtype in _TYPES else 1
        for name, extent in (("a", k),) if a.shape[-1] == k else (("a", a.shape[-1]), ("b", k)):
            if extent % step:
                below = extent - extent % step
                nearest = " or ".join(str(value) for value in (below, below + step) if value)
                yield ValueError(
                    f"{name} has K = {extent}, allowed: multiples of {step}, since TMA reads rows of whole 16 bytes; "
                    f"nearest {nearest}"
                )
        if bias is not None and tuple(bias.shape) != (n,):
            yield ValueError(f"bias has shape {list(bias.shape)}, allowed: [N] = [{n}]")

    def problem(self, args: GemmArguments) -> GemmProblem:
        n, k = args.b.shape[-2:]
        batches = args.a.shape[0] if args.b.dim() == 3 else 1
        dtypes = map(name_of, (args.a.dtype, self.output_dtype(args)))
        has_bias = args.bias is not None
        return GemmProblem(args.a.numel() // max(batches * k, 1), n, k, batches, *dtypes, has_bias, args.activation)

    def smallest(self, problem: GemmProblem) -> GemmProblem:
        return dataclasses.replace(problem, m=1)

    def smaller(self, problem: GemmProblem) -> GemmProblem:
        sizes = {"m": min(problem.m, 512), "n": min(problem.n, 256), "k": min(problem.k, 256)}
        return dataclasses.replace(problem, **sizes, batches=1)

    def example(self, problem: GemmProblem, device: str = "cpu") -> GemmArguments:
        p = problem
        draw = functools.partial(random_values, dtype=getattr(torch, p.in_dtype), device=device)
        a, b = (draw(p.batches, rows, p.k) for rows in (p.m, p.n))
        bias = random_values(p.n, dtype=torch.float32, device=device) if p.bias else None
        return GemmArguments(a, b, bias, getattr(torch, p.out_dtype), "auto", None, True, p.activation)

    def shardings(self, shapes: Mapping[str, Shape], parts: int) -> Iterator[Sharding]:
        """Batches, rows of ``a``, rows of ``b``."""
        rows = len(shapes["a"]) - 2
        batched = len(shapes["b"]) == 3
        if rows:
            yield 0, {"a": 0} | ({"b": 0} if batched else {})
        yield rows, {"a": rows}
        yield rows + 1, {"b": int(batched), "bias": 0}

    def variants(self, plan: GemmPlan) -> list[GemmPlan]:
        """Plans with the same tiles in other orders."""
        own = plan.config.group_m
        if plan.n_tiles == 1:
            return []
        groups = [group for group in GROUPS if group != own and plan.m_tiles > min(group, own)]
        return [dataclasses.replace(plan, config=dataclasses.replace(plan.config, group_m=group)) for group in groups]

    def prepare(self, args: GemmArguments, plan: GemmPlan) -> Prepared:
        """Aligns, pads the bias, allocates the output with the pitch that TMA needs."""
        problem = plan.problem
        m, n, k, batches = problem.m, problem.n, problem.k, problem.batches
        pad = functools.partial(_padded_bias, columns=plan.padded_n)
        dtype = getattr(torch, problem.out_dtype)
        operands = Operands(
            a=_aligned(args.a).view(batches, m, k),
            b=_aligned(args.b).view(batches, n, k),
            bias=None if args.bias is None else pad(args.bias),
            out=torch.empty(batches, m, plan.out_pitch, dtype=dtype, device=args.a.device),
        )
        return Prepared(plan, operands, self.output_shape(args), {"bias": pad})

    def reference(self, args: GemmArguments) -> torch.Tensor:
        a, b = args.a, args.b
        rows = a.view(-1, a.shape[-1]) if b.dim() == 2 else a
        split = getattr(args.config, "split_k", 1)
        out = reference.gemm(rows, b, args.bias, args.out_dtype, split, args.activation)
        return out.view(self.output_shape(args))

    def output_shape(self, args: GemmArguments) -> tuple[int, ...]:
        return (*args.a.shape[:-1], args.b.shape[-2])

    def output_dtype(self, args: GemmArguments) -> torch.dtype:
        return args.out_dtype or args.a.dtype


GEMM = _Gemm()


def prepare_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    allow_tf32: bool = False,
    activation: Activation = "none",
) -> Prepared:
    """Everything but the launch; arguments and errors as `gemm`, and ValueError for an illegal config."""
    return GEMM.checked(GemmArguments(a, b, bias, out_dtype, "auto", config, allow_tf32, activation))


def _padded_bias(bias: torch.Tensor, columns: int) -> torch.Tensor:
    """FP32 with zeros up to ``columns``, kept while the bias lives unchanged."""

    def build() -> torch.Tensor:
        return torch.nn.functional.pad(bias.detach().to(torch.float32), (0, columns - bias.shape[0]))

    return DERIVED.get(("gemm bias", columns), (bias,), build)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, since a view of a parameter would keep `torch.utils.swap_tensors` from swapping it."""
    return tensor.detach() if tensor.data_ptr() % ROW_BYTES == 0 else tensor.clone()
