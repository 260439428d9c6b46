"""`gemm`: its arguments, what they have to be, and what the kernel gets of them."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from cute_kernels.config import ACTIVATIONS, Activation, GemmConfig, GemmProblem, longest_row, name_of
from cute_kernels.operations import arguments, reference
from cute_kernels.operations.arguments import Backend
from cute_kernels.operations.base import ROW_BYTES, Operation, Prepared, random_values
from cute_kernels.operations.derivatives import activation_gradient, scaled
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.operations.runtime.repeat import ScaleProduct
from cute_kernels.operations.scales import (
    combine_numbers,
    combine_scales,
    in_kernel_order,
    is_vector,
    only_number,
    output_number,
    output_scale,
    scale_problems,
)
from cute_kernels.operations.sharding import Shape, Sharding
from cute_kernels.plan.gemm import B_TYPES, FLOATS, GemmPlan
from cute_kernels.plan.registry import GEMM as PLANNER

GROUPS = (1, 4, 8, 16)
"""Values of ``group_m`` that a tuner tries on the fastest candidate."""

_FLOATS = tuple(getattr(torch, name) for name in FLOATS)
_A_TYPES = tuple(getattr(torch, name) for name in B_TYPES)
_B_TYPES = tuple(dict.fromkeys(getattr(torch, name) for name in B_TYPES.values()))
_OUT_TYPES = (*_FLOATS, torch.float8_e4m3fn)

_Stream = tuple[torch.device, int]
_COUNTERS: dict[_Stream, torch.Tensor] = {}
_SUMS: dict[_Stream, torch.Tensor] = {}


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
    scale_a: float | torch.Tensor | None = None,
    scale_b: float | torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_scale: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """``activation(scale_a * scale_b * (a @ b.T) + bias) + residual``, in the layout of `torch.nn.functional.linear`.

    The accumulator is FP32 and rounded once per tensor-core instruction of 32 bytes of K; of integers it is exact, and
    rounded to FP32 once. ``scale = scale_a * scale_b`` is one FP32 product; the accumulator is multiplied by it and
    FP32 ``bias`` added with one rounding, the activation is computed from operations that IEEE 754 rounds correctly,
    the residual is added with one rounding, and the result is rounded once to ``out_dtype``:
    `cute_kernels.operations.reference.gemm` says the same in plain torch, and what the ``split_k`` of a config changes
    in the order of the additions. Of float32 operands the tensor core multiplies TF32, which has FP32's range and 11
    significant bits: every element is rounded to the nearest one first, ties to even. Names and shapes of the
    multipliers are those of `torch.nn.functional.scaled_mm`.

    Args:
        a: ``[M, K]`` or ``[B, M, K]`` bfloat16, float16, float8_e4m3fn, int8, uint8 or, with ``allow_tf32``, float32,
            contiguous; K a multiple of 16 bytes (TMA reads rows of whole ones), at least that; of uint8 at most 65,792,
            of int8 131,056. A slice whose memory does not start on 16 bytes is copied. Of no rows nothing is launched.
        b: ``[N, K]`` of the same type, int8 for integers, for all of a batch, or ``[B, N, K]``, no extent 0.
        bias: ``[N]`` BF16, FP16 or FP32, or None. The kernel converts it to FP32; one that is not contiguous, or does
            not start on 16 bytes, is copied.
        out_dtype: bfloat16, float16, float32 or float8_e4m3fn; when None the type of ``a``, of 8 bits bfloat16.
        config: tunables of the kernel, `Sm100GemmConfig`, `Sm90GemmConfig` or `Sm80GemmConfig`; None takes what
            `cute_kernels.tune_gemm` found for this problem, or chooses by size. The emulator runs the kernel of the
            config's architecture, SM100's without a config.
        backend: ``"auto"``: the compiled kernel for CUDA tensors, plain torch for CPU tensors. ``"emulator"``: the
            compiled PTX, executed on the CPU. ``"reference"``: plain torch on any device.
        allow_tf32: accepts float32 operands although 13 of their 24 significant bits are lost; of no effect on others.
        activation: ``"none"``, ``"relu"``, ``"relu_squared"``, ``"silu"`` (``x * sigmoid(x)``), ``"quick_gelu"`` (``x *
            sigmoid(1.702 x)``), ``"gelu"`` (GELU in its exact form) or ``"gelu_tanh"`` (in its tanh form, as
            `torch.nn.functional.gelu` with ``approximate="tanh"``). Of a sum x, the error of the last four is at most
            ``7e-4 |x|`` where ``out_dtype`` is bfloat16, a fifth of what rounding to it adds, ``3e-3 |x|`` where it is
            float8_e4m3fn, a twentieth (x in units of ``out_scale``, from ``2**-13`` on: smaller ones become 0), and
            ``8e-7 |x|`` elsewhere, at twice the cost.
        scale_a: what elements of ``a`` are multiplied by to mean numbers: None (1), a number, an FP32 tensor of one
            element, or of shape ``[M, 1]``, of a batch ``[B, M, 1]``: one for each row. Of any element type: what is
            multiplied are sums, so that ``scale_b`` may be that of a weight which was converted to 16 bits.
        scale_b: likewise of ``b``; ``[1, N]``, of a batched ``b`` ``[B, 1, N]``: one for each of its rows.
        residual: of the result's shape, BF16, FP16 or FP32, contiguous, or None.
        out_scale: with ``out_dtype`` float8_e4m3fn what an element of the result is multiplied by to mean a number,
            ``scale_a`` of a call that takes it: None (1), a number, or an FP32 tensor of one element, which the kernel
            reads. Results are multiplied by ``fp32(1 / out_scale)`` and rounded; what is beyond 448 becomes 448, with
            its sign. It is the reciprocal of `torch._scaled_mm`'s ``scale_result``.

    Returns:
        ``[M, N]`` or ``[B, M, N]`` in ``out_dtype``, contiguous. N whose rows are no multiple of 16 bytes costs a copy,
        and of a residual with such rows another. Derivatives for ``a``, ``b``, ``bias`` and
        ``residual`` are products of plain torch; of operands or results of 8 bits, for scales and in forward mode there
        are none: asking for one raises NotImplementedError. Of DTensors it is a DTensor
        (`cute_kernels.operations.sharding`).

    Raises:
        TypeError: an argument of the wrong type or element type, float32 without ``allow_tf32`` among them.
        ValueError: a wrong shape, stride, device, scale, backend or config value.
        NotImplementedError: a device without a kernel.
    """
    return GEMM.call(
        (a, b, bias, scale_a, scale_b, residual, out_scale, out_dtype, backend, config, allow_tf32, activation)
    )


@dataclass(frozen=True, eq=False)
class GemmArguments:
    """The table of arguments; what they mean is said at `gemm`."""

    a: torch.Tensor = arguments.tensor(*_A_TYPES, shapes=("[M, K]", "[B, M, K]"), dense=True, may_be_empty=True)
    b: torch.Tensor = arguments.tensor(*_B_TYPES, shapes=("[N, K]", "[B, N, K]"), dense=True)
    bias: torch.Tensor | None = arguments.tensor(*_FLOATS, optional=True)
    scale_a: float | torch.Tensor | None = arguments.scale("row_scale")
    scale_b: float | torch.Tensor | None = arguments.scale("column_scale")
    residual: torch.Tensor | None = arguments.tensor(
        *_FLOATS, shapes=("[M, N]", "[B, M, N]"), dense=True, may_be_empty=True, optional=True
    )
    out_scale: float | torch.Tensor | None = arguments.scale("")
    out_dtype: torch.dtype | None = arguments.plain("ScalarType? out_dtype", torch.dtype, optional=True)
    backend: Backend = arguments.backend()
    config: GemmConfig | None = arguments.config(PLANNER.codec)
    allow_tf32: bool = arguments.plain("bool allow_tf32=False", bool, default=False)
    activation: Activation = arguments.plain("str activation='none'", str, default="none")


class _Gemm(Operation[GemmArguments]):
    planner = PLANNER
    arguments = GemmArguments
    differentiable = ("a", "b", "bias", "residual")
    rotated = "a"
    scales = (
        ScaleProduct(("scale_a", "scale_b"), "scale", combine_numbers, combine_scales),
        ScaleProduct(("out_scale",), "out_scale", output_number, output_scale),
    )

    def problems(self, args: GemmArguments) -> Iterator[Exception]:
        a, b, bias = args.a, args.b, args.bias
        if a.dtype is torch.float32 and not args.allow_tf32:
            yield TypeError(
                "a has dtype torch.float32, of which the tensor core would multiply 11 of 24 significant bits (TF32): "
                "must be torch.bfloat16, torch.float16, or torch.float32 with allow_tf32=True"
            )
        matching = B_TYPES.get(name_of(a.dtype))
        if matching is not None and name_of(b.dtype) != matching:
            yield TypeError(f"b has dtype {b.dtype} with a of {a.dtype}: must be torch.{matching}")
        if args.activation not in ACTIVATIONS:
            yield ValueError(f"activation = {args.activation!r}: must be one of {', '.join(map(repr, ACTIVATIONS))}")
        if args.out_dtype is not None and args.out_dtype not in _OUT_TYPES:
            yield ValueError(f"out_dtype = {args.out_dtype}: must be one of {', '.join(map(str, _OUT_TYPES))}")
        if args.out_scale is not None and args.out_dtype is not torch.float8_e4m3fn:
            given = "a tensor" if isinstance(args.out_scale, torch.Tensor) else args.out_scale
            yield ValueError(f"out_scale = {given} is given: must be with out_dtype {torch.float8_e4m3fn}")
        if b.dim() > a.dim():
            yield ValueError(f"b has shape {list(b.shape)} beside a {list(a.shape)}: must be [N, K]")
        elif b.dim() == 3 and a.shape[0] != b.shape[0]:
            yield ValueError(f"a has B = {a.shape[0]} and b has B = {b.shape[0]}: they must be equal")
        n, k = b.shape[-2:]
        if a.shape[-1] != k:
            yield ValueError(f"a has K = {a.shape[-1]} and b has K = {k}: they must be equal")
        step = ROW_BYTES // a.itemsize if a.dtype in _A_TYPES else 1
        for name, extent in (("a", k),) if a.shape[-1] == k else (("a", a.shape[-1]), ("b", k)):
            if extent % step:
                below = extent - extent % step
                nearest = " or ".join(str(value) for value in (below, below + step) if value)
                yield ValueError(
                    f"{name} has K = {extent}: must be multiples of {step}, since TMA reads rows of whole 16 bytes; "
                    f"nearest {nearest}"
                )
        most = longest_row(name_of(a.dtype))
        if most is not None and k > most:
            yield ValueError(f"a has K = {k}: must be at most {most} of {a.dtype}, whose sums would leave 32 bits")
        if bias is not None and tuple(bias.shape) != (n,):
            yield ValueError(f"bias has shape {list(bias.shape)}: must be [N] = [{n}]")
        if args.residual is not None and tuple(args.residual.shape) != self.output_shape(args):
            shape = list(args.residual.shape)
            yield ValueError(f"residual has shape {shape}: must be the result's {list(self.output_shape(args))}")
        yield from self._scale_problems(args)

    def check_values(self, args: GemmArguments) -> None:
        if not any(isinstance(scale, torch.Tensor) for scale in (args.scale_a, args.scale_b)):
            combine_numbers(args.scale_a, args.scale_b)
        if not isinstance(args.out_scale, torch.Tensor):
            output_number(args.out_scale)

    @staticmethod
    def _scale_problems(args: GemmArguments) -> Iterator[Exception]:
        a, b = args.a, args.b
        n = b.shape[-2]
        by_row = {"[B, M, 1]": (*a.shape[:-1], 1)} if a.dim() == 3 else {"[M, 1]": (a.shape[0], 1)}
        if a.dim() == 3 and b.dim() == 2:
            by_row["[B * M, 1]"] = (a.shape[0] * a.shape[1], 1)
        yield from scale_problems("scale_a", args.scale_a, by_row)
        by_column = {"[B, 1, N]": (b.shape[0], 1, n)} if b.dim() == 3 else {"[1, N]": (1, n)}
        yield from scale_problems("scale_b", args.scale_b, by_column)
        yield from scale_problems("out_scale", args.out_scale, {})

    def problem(self, args: GemmArguments) -> GemmProblem:
        n, k = args.b.shape[-2:]
        batches = args.a.shape[0] if args.b.dim() == 3 else 1
        scales = args.scale_a, args.scale_b
        in_memory = any(isinstance(only_number(scale), torch.Tensor) for scale in scales)
        by_value = not any(isinstance(scale, torch.Tensor) for scale in scales) and scales != (None, None)
        return GemmProblem(
            m=args.a.numel() // max(batches * k, 1),
            n=n,
            k=k,
            batches=batches,
            in_dtype=name_of(args.a.dtype),
            out_dtype=name_of(self.output_dtype(args)),
            bias=args.bias is not None,
            activation=args.activation,
            scale_source="pointer" if in_memory else "value",
            row_scale=is_vector(args.scale_a),
            column_scale=is_vector(args.scale_b),
            residual=None if args.residual is None else name_of(args.residual.dtype),
            with_scale=args.a.itemsize > 1 and by_value,
            bias_dtype="float32" if args.bias is None else name_of(args.bias.dtype),
            out_scale_source="pointer" if isinstance(args.out_scale, torch.Tensor) else "value",
        )

    def tuned_problem(self, problem: GemmProblem) -> GemmProblem:
        """From where the number for the call comes costs nothing."""
        # Numbers of the call and the bytes of a bias cost nothing, whatever they are.
        numbers = {"scale_source": "value", "out_scale_source": "value", "with_scale": False}
        return dataclasses.replace(problem, **numbers, bias_dtype="float32")

    def smallest(self, problem: GemmProblem) -> GemmProblem:
        return dataclasses.replace(problem, m=1)

    def smaller(self, problem: GemmProblem) -> Iterator[GemmProblem]:
        """Rows and columns that fill tiles of powers of two and of three times these; columns as aligned as before."""
        for extent, k in itertools.product((256, 512, 768, 1536), (256, 1024)):
            columns = min(problem.n, extent - -problem.n % 64)
            yield dataclasses.replace(problem, m=min(problem.m, extent), n=columns, k=min(problem.k, k), batches=1)

    def example(self, problem: GemmProblem, device: str = "cpu") -> GemmArguments:
        p = problem
        draw = functools.partial(random_values, device=device)
        a, b = (
            draw(p.batches, rows, p.k, dtype=getattr(torch, dtype))
            for rows, dtype in ((p.m, p.in_dtype), (p.n, B_TYPES[p.in_dtype]))
        )
        factors = functools.partial(torch.rand, dtype=torch.float32, device=device)
        scale_a = factors(p.batches, p.m, 1) + 0.5 if p.row_scale else 0.05 if p.scaled else None
        if p.scale_source == "pointer" and not p.row_scale:
            scale_a = torch.tensor(0.05, dtype=torch.float32, device=device)
        in_memory = p.out_scale_source == "pointer"
        return self.given(
            a=a,
            b=b,
            bias=draw(p.n, dtype=getattr(torch, p.bias_dtype)) if p.bias else None,
            scale_a=scale_a,
            scale_b=factors(p.batches, 1, p.n) + 0.5 if p.column_scale else None,
            residual=draw(p.batches, p.m, p.n, dtype=getattr(torch, p.residual)) if p.residual else None,
            out_scale=torch.tensor(0.5, dtype=torch.float32, device=device) if in_memory else None,
            out_dtype=getattr(torch, p.out_dtype),
            allow_tf32=True,
            activation=p.activation,
        )

    def shardings(self, shapes: Mapping[str, Shape], parts: int) -> Iterator[Sharding]:
        """Batches, rows of ``a``, rows of ``b``; multipliers and the residual are divided with them.

        Multipliers of the rows of a 3-D ``a`` as ``[B * M, 1]`` where the parts are equal, along B.
        """
        rows = len(shapes["a"]) - 2
        batched = len(shapes["b"]) == 3
        by_row, by_column = (math.prod(shapes.get(name, ())) > 1 for name in ("scale_a", "scale_b"))
        flat = by_row and len(shapes["scale_a"]) < len(shapes["a"])
        if rows and not (flat and shapes["a"][0] % parts):
            along = {"a": 0, "residual": 0} | ({"b": 0} if batched else {}) | ({"scale_a": 0} if by_row else {})
            yield 0, along | ({"scale_b": 0} if by_column and batched else {})
        if not flat:
            yield rows, {"a": rows, "residual": rows} | ({"scale_a": rows} if by_row else {})
        columns = {"b": int(batched), "bias": 0, "residual": rows + 1}
        yield rows + 1, columns | ({"scale_b": 1 + batched} if by_column else {})

    def variants(self, plan: GemmPlan) -> list[GemmPlan]:
        """Plans with the same tiles in other orders."""
        own = plan.config.group_m
        if plan.n_tiles == 1:
            return []
        groups = [group for group in GROUPS if group != own and plan.m_tiles > min(group, own)]
        return [dataclasses.replace(plan, config=dataclasses.replace(plan.config, group_m=group)) for group in groups]

    def prepare(self, args: GemmArguments, plan: GemmPlan) -> Prepared:
        """Aligns, allocates the output with the pitch that TMA needs."""
        problem = plan.problem
        m, n, k, batches = problem.m, problem.n, problem.k, problem.batches
        dtype = getattr(torch, problem.out_dtype)
        operands = Operands(
            **_workspace(plan, args.a.device),
            a=_aligned(args.a).view(batches, m, k),
            b=_aligned(args.b).view(batches, n, k),
            bias=None if args.bias is None else _aligned(args.bias.resolve_neg().contiguous()),
            scale=combine_scales(*map(only_number, (args.scale_a, args.scale_b))) if problem.call_scale else None,
            row_scale=in_kernel_order(args.scale_a),
            column_scale=in_kernel_order(args.scale_b),
            residual=None if args.residual is None else _padded_rows(args.residual, plan.residual_pitch),
            out_scale=output_scale(args.out_scale) if plan.narrows else None,
            out=torch.empty(batches, m, plan.out_pitch, dtype=dtype, device=args.a.device),
        )
        return Prepared(plan, operands, self.output_shape(args))

    def reference(self, args: GemmArguments) -> torch.Tensor:
        a, b = args.a, args.b
        rows = a.view(-1, a.shape[-1]) if b.dim() == 2 else a
        split = getattr(args.config, "split_k", 1)
        scale_a, residual = args.scale_a, args.residual
        if is_vector(scale_a):
            scale_a = scale_a.reshape(*rows.shape[:-1], 1)
        out = reference.gemm(
            rows,
            b,
            args.bias,
            self.output_dtype(args),
            split,
            args.activation,
            scale_a=scale_a,
            scale_b=args.scale_b,
            residual=None if residual is None else residual.view(*rows.shape[:-1], b.shape[-2]),
            out_scale=args.out_scale,
        )
        return out.view(self.output_shape(args))

    def reads(self, name: str, flat: tuple) -> tuple[str, ...]:
        """With an activation also those that its argument is computed from again."""
        activated = self.arguments(*self.table.decode(flat)).activation != "none"
        again = ("a", "b", "bias", "scale_a", "scale_b") if activated and name != "residual" else ()
        return super().reads(name, flat) + again

    def gradients(self, args: GemmArguments, grad: torch.Tensor, facts) -> dict[str, torch.Tensor]:
        found, dtype = {"residual": grad}, facts["b"].dtype
        if args.activation != "none" and facts.wanted != {"residual"}:
            given = {"bias": args.bias, "scale_a": args.scale_a, "scale_b": args.scale_b, "backend": args.backend}
            argument = gemm(args.a, args.b, **given, out_dtype=torch.float32, allow_tf32=args.allow_tf32)
            grad = activation_gradient(args.activation, grad.float(), argument)
        if "bias" in facts.wanted:
            found["bias"] = grad.flatten(0, -2).sum(0, dtype=torch.float32)
        sums = scaled(grad, args.scale_a, args.scale_b).to(dtype)
        if "a" in facts.wanted:
            found["a"] = sums @ args.b
        if "b" in facts.wanted:
            flat = 0 if len(facts["b"].shape) == 2 else -2
            found["b"] = sums.flatten(flat, -2).mT @ args.a.flatten(flat, -2)
        return found

    def output_shape(self, args: GemmArguments) -> tuple[int, ...]:
        return (*args.a.shape[:-1], args.b.shape[-2])

    def output_dtype(self, args: GemmArguments) -> torch.dtype:
        return args.out_dtype or (torch.bfloat16 if args.a.itemsize == 1 else args.a.dtype)


GEMM = _Gemm()


def _workspace(plan: GemmPlan, device: torch.device) -> dict[str, torch.Tensor]:
    """Operands that slices of K are added through, if a plan has them."""
    if not any(operand.name == "partials" and operand.present for operand in plan.operands):
        return {}
    dtype = torch.int32 if plan.sums_integers else torch.float32
    arrivals, partials = workspace(device, plan.shared_tiles, plan.tiles * plan.partial_elements, dtype)
    return {"arrivals": arrivals, "partials": partials}


def workspace(device: torch.device, counters: int, sums: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory that kernels pass sums through from one CTA to another, for launches on the current stream: int32
    counters, which kernels leave as 0, and sums of 4 bytes.

    Launches of one stream follow each other and share it. A CUDA graph may run beside them: what is captured has its
    own.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(counters, dtype=torch.int32, device=device), torch.empty(sums, dtype=dtype, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _COUNTERS or len(_COUNTERS[key]) < counters:
        _COUNTERS[key] = torch.zeros(counters, dtype=torch.int32, device=device)
    if key not in _SUMS or len(_SUMS[key]) < sums:
        _SUMS[key] = torch.empty(sums, dtype=torch.float32, device=device)
    return _COUNTERS[key][:counters], _SUMS[key][:sums].view(dtype)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, since a view of a parameter would keep `torch.utils.swap_tensors` from swapping it."""
    return tensor.detach() if tensor.data_ptr() % ROW_BYTES == 0 else tensor.clone()


def _padded_rows(rows: torch.Tensor, pitch: int) -> torch.Tensor:
    """``rows`` itself if a kernel can read it by 16 bytes, otherwise a copy whose rows are ``pitch`` elements."""
    missing = pitch - rows.shape[-1]
    return torch.nn.functional.pad(rows.detach(), (0, missing)) if missing else _aligned(rows)
