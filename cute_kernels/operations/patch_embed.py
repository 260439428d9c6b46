"""`patch_embed`: its arguments, what they have to be, and what the kernel gets of them."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from cute_kernels.config import WEIGHT_TYPES, PatchEmbedConfig, PatchEmbedProblem, longest_row, name_of
from cute_kernels.operations import arguments, reference
from cute_kernels.operations.arguments import Backend
from cute_kernels.operations.base import ROW_BYTES, Operation, Prepared, random_values
from cute_kernels.operations.derivatives import position_gradient, scaled
from cute_kernels.operations.runtime.constants import DERIVED
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.operations.runtime.repeat import ScaleProduct
from cute_kernels.operations.scales import (
    combine_numbers,
    combine_scales,
    in_kernel_order,
    is_vector,
    only_number,
    scale_problems,
)
from cute_kernels.operations.sharding import Shape, Sharding
from cute_kernels.operations.table import one_table, rows_table
from cute_kernels.plan.base import round_up
from cute_kernels.plan.patch_embed import PatchEmbedPlan
from cute_kernels.plan.registry import PATCH_EMBED as PLANNER

_ROWS = tuple(getattr(torch, name) for name in WEIGHT_TYPES)
_WEIGHTS = tuple(dict.fromkeys(getattr(torch, name) for name in WEIGHT_TYPES.values()))
_ADDENDS = (torch.bfloat16, torch.float16, torch.float32)
_REFERENCES = {"f32": reference.patch_embed_f32, "bf16x2": reference.patch_embed_bf16x2}


def patch_embed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    pos_embed: torch.Tensor | None = None,
    *,
    pos_index: torch.Tensor | None = None,
    scale_a: float | torch.Tensor | None = None,
    scale_b: float | torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: PatchEmbedConfig | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Patch embedding of rows: ``out[b, s, :] = scale_a * scale_b * (x[b, s, :] @ weight.T) + bias + pos_embed[s, :]``.

    Multipliers have the names and shapes of `torch.nn.functional.scaled_mm`: one for a whole tensor, or one for each
    row of ``x`` and of ``weight``, in any combination.

    Args:
        x: ``[B, S, K]`` or ``[B * S, K]``, contiguous, K >= 1; float8_e4m3fn, uint8, int8, bfloat16 or
            float16. A slice whose memory does not start on 16 bytes is copied, and rows of no multiple of 16 bytes are
            zero-padded, once per call. Of uint8 K is at most 65,792, of int8 131,056. Of no rows the result is
            empty, and nothing is launched.
        weight: ``[N, K]`` of x's type, int8 for uint8, contiguous, N a multiple of 8. Padded and aligned likewise, once
            per weight.
        bias: ``[N]`` BF16, FP16 or FP32, any stride, or None. What the kernel reads of bias, position and weight is
            laid out once and found again by object, memory, autograd's version counter and, as
            `cute_kernels.clear_cache` says, their numbers.
        pos_embed: ``[S, N]`` BF16, FP16 or FP32, any stride, or None. With a 2-D ``x`` it tells S.
        pos_index: for packed rows of variable length: ``[T]`` (or ``[B, L]`` with a 3-D ``x``) int32 or int64,
            contiguous; row t gets ``pos_embed[pos_index[t]]``, and the result is ``[T, N]`` (``[B, L, N]``). A number
            outside ``0 .. S - 1`` raises ValueError for CPU tensors; on a GPU, where looking would make the host wait,
            it gives a row of NaN. int64 is converted by two small kernels, and such a call is never a warm one.
            With ``pos_embed`` ``[2, S, N]``, a table for each of two axes, it is ``[T, 2]`` (``[B, L, 2]``), and row t
            gets ``fp32(pos_embed[0, pos_index[t, 0]]) + fp32(pos_embed[1, pos_index[t, 1]])``, of -1 nothing. The sums
            are made once for an index tensor, of the pairs that occur: on a GPU the host waits for their number.
        scale_a: dequantisation multiplier of ``x``: None (1), a number that is finite and > 0 in FP32, or an FP32
            tensor, which is read on the device and not checked: of one element, or of one for each row, ``[B * S, 1]``
            or with a 3-D ``x`` also ``[B, S, 1]``. Of rows, any stride; what is not contiguous is copied.
        scale_b: dequantisation multiplier of ``weight``, likewise: of one element, or of one for each feature,
            ``[1, N]``. Row m and feature n are multiplied by ``scale = fp32(scale_a[m] * scale_b[n])``, so that rows
            with equal multipliers get the bits that one multiplier for all gives.
        out_dtype: ``torch.bfloat16``.
        config: tunables of the kernel: `Sm100PatchEmbedConfig` (weight streamed) or `Sm100ResidentConfig` (weight on
            chip) for SM100, `Sm90PatchEmbedConfig` for SM90; None takes the plan's choice. An illegal one is refused on
            every backend. The emulator runs the kernel of the config's architecture, SM100's without a config.
            ``config.epilogue`` selects the rounding contract on every backend: ``"f32"`` (default) is
            ``bf16(fma32(acc, scale, fp32(bias) + fp32(pos)))``, ``"bf16x2"`` is
            ``bf16(bf16(acc * scale) + bf16(fp32(bias) + fp32(pos)))``. ``acc`` is accumulated in FP32, of integers in
            32-bit integers and then rounded to FP32 once: sums of integers are exact, so that the result is the same in
            every bit on every device.
        backend: ``"auto"``: the compiled kernel for CUDA tensors, plain torch for CPU tensors. ``"emulator"``: the
            compiled PTX, executed on the CPU. ``"reference"``: plain torch on any device.

    Returns:
        ``[B, S, N]`` bfloat16, contiguous. A 2-D ``x`` without ``pos_embed`` has no S: the result is ``[rows, N]``.
        NaN and infinity in any tensor are not looked for and propagate as IEEE 754 says. Derivatives for
        ``x``, ``weight``, ``bias`` and ``pos_embed`` are products of plain torch; for operands of 8 bits, for scales
        and in forward mode there are none: asking for one raises NotImplementedError. Of DTensors it is a DTensor
        (`cute_kernels.operations.sharding`).

    Raises:
        TypeError: an argument of the wrong type, element type or layout.
        ValueError: a wrong shape, stride, device, scale, backend or config value.
        NotImplementedError: a device without a kernel.
    """
    if out_dtype is not torch.bfloat16:
        raise ValueError(f"out_dtype = {out_dtype}: must be torch.bfloat16")
    if all(isinstance(given, torch.Tensor) for given in (x, pos_embed, pos_index)) and pos_embed.dim() == 3:
        pos_embed, pos_index = one_table(pos_embed, pos_index, tuple(x.shape[:-1]))
    return PATCH_EMBED.call((x, weight, bias, pos_embed, pos_index, scale_a, scale_b, backend, config))


@dataclass(frozen=True, eq=False)
class PatchEmbedArguments:
    """The table of arguments; what they mean is said at `patch_embed`."""

    x: torch.Tensor = arguments.tensor(*_ROWS, shapes=("[B, S, K]", "[B * S, K]"), dense=True, may_be_empty=True)
    weight: torch.Tensor = arguments.tensor(*_WEIGHTS, shapes=("[N, K]",), dense=True, role="constant")
    bias: torch.Tensor | None = arguments.tensor(*_ADDENDS, optional=True, role="constant")
    pos_embed: torch.Tensor | None = arguments.tensor(*_ADDENDS, optional=True, role="constant")
    pos_index: torch.Tensor | None = arguments.tensor(torch.int32, torch.int64, optional=True, operand="index")
    scale_a: float | torch.Tensor | None = arguments.scale("row_scale")
    scale_b: float | torch.Tensor | None = arguments.scale("feature_scale")
    backend: Backend = arguments.backend()
    config: PatchEmbedConfig | None = arguments.config(PLANNER.codec)


class _PatchEmbed(Operation[PatchEmbedArguments]):
    planner = PLANNER
    arguments = PatchEmbedArguments
    differentiable = ("x", "weight", "bias", "pos_embed")
    rotated = "x"
    scales = (ScaleProduct(("scale_a", "scale_b"), "scale", combine_numbers, combine_scales),)

    def problems(self, a: PatchEmbedArguments) -> Iterator[Exception]:
        x, bias, pos_embed = a.x, a.bias, a.pos_embed
        n, k = a.weight.shape
        in_dtype = name_of(x.dtype)
        matching = WEIGHT_TYPES.get(in_dtype)
        if matching is not None and name_of(a.weight.dtype) != matching:
            yield TypeError(f"weight has dtype {a.weight.dtype} with x of {x.dtype}: must be torch.{matching}")
        if x.shape[-1] != k:
            yield ValueError(f"x has K = {x.shape[-1]} and weight has K = {k}: they must be equal")
        most = None if matching is None else longest_row(in_dtype)
        if most is not None and k > most:
            yield ValueError(
                f"x has K = {k}: must be at most {most} of {x.dtype}, whose sums with int8 would leave 32 bits"
            )
        if n % 8:
            nearest = f"{max(8, n - n % 8)} or {n + 8 - n % 8}"
            yield ValueError(f"weight has N = {n}: must be multiples of 8, nearest {nearest}")
        rows = x.numel() // x.shape[-1]
        if bias is not None and tuple(bias.shape) != (n,):
            yield ValueError(f"bias has shape {list(bias.shape)}: must be [N] = [{n}]")
        if pos_embed is not None:
            if pos_embed.dim() != 2 or pos_embed.shape[1] != n or pos_embed.shape[0] == 0:
                shape = list(pos_embed.shape)
                yield ValueError(f"pos_embed has shape {shape}: must be [S, N] with N = {n} and S >= 1")
        if a.pos_index is not None:
            yield from _index_problems(x, pos_embed, a.pos_index)
        elif pos_embed is not None:
            positions = pos_embed.shape[0]
            if x.dim() == 3 and x.shape[1] != positions:
                yield ValueError(f"pos_embed has S = {positions} and x has S = {x.shape[1]}: they must be equal")
            if x.dim() == 2 and rows % positions:
                yield ValueError(f"x has {rows} rows: must be a multiple of pos_embed's S = {positions}")
        by_row = {"[M, 1]": (rows, 1)} | ({"[B, S, 1]": (*x.shape[:2], 1)} if x.dim() == 3 else {})
        yield from scale_problems("scale_a", a.scale_a, by_row)
        yield from scale_problems("scale_b", a.scale_b, {"[1, N]": (1, n)})

    def check_values(self, a: PatchEmbedArguments) -> None:
        if a.pos_index is not None and a.pos_index.numel() and a.pos_index.device.type == "cpu":
            _check_positions(a.pos_index, a.pos_embed.shape[0])

    def problem(self, a: PatchEmbedArguments) -> PatchEmbedProblem:
        n, k = a.weight.shape
        positions = a.pos_embed.shape[0] if a.pos_embed is not None else 1
        in_memory = any(isinstance(only_number(scale), torch.Tensor) for scale in (a.scale_a, a.scale_b))
        return PatchEmbedProblem(
            m=a.x.numel() // k,
            n=n,
            k=round_up(k, ROW_BYTES // a.weight.itemsize),
            in_dtype=name_of(a.x.dtype),
            table_rows=0 if a.bias is None and a.pos_embed is None else positions,
            scale_source="pointer" if in_memory else "value",
            table_index=a.pos_index is not None,
            row_scale=is_vector(a.scale_a),
            feature_scale=is_vector(a.scale_b),
        )

    def smallest(self, problem: PatchEmbedProblem) -> PatchEmbedProblem:
        """One image."""
        return dataclasses.replace(problem, m=max(problem.table_rows, 1))

    def smaller(self, problem: PatchEmbedProblem) -> Iterator[PatchEmbedProblem]:
        """Whole images where those of the problem are: few of them, or more of a few positions, which fill tiles whose
        rows are images at one position. All features and all of K: where the weight stays, its size decides."""
        image = max(problem.table_rows, 1)
        if problem.table_index or problem.m % image:
            image = 1
        for rows in (512, 1024, 2048, 4096, 8192):
            yield dataclasses.replace(problem, m=min(problem.m, max(1, rows // image) * image))
            for positions in (2, 4, 8, 16) if image > 16 else ():
                yield dataclasses.replace(problem, m=min(rows, problem.m // image * positions), table_rows=positions)

    def example(self, problem: PatchEmbedProblem, device: str = "cpu") -> PatchEmbedArguments:
        p = problem
        dtypes = getattr(torch, p.in_dtype), getattr(torch, WEIGHT_TYPES[p.in_dtype])
        draw = functools.partial(random_values, device=device)
        x, weight = draw(p.m, p.k, dtype=dtypes[0]), draw(p.n, p.k, dtype=dtypes[1])
        with_positions = p.table_rows > 1 or p.table_index
        scale_a = torch.rand(p.m, 1, dtype=torch.float32, device=device) + 0.5 if p.row_scale else 0.05
        if p.scale_source == "pointer" and not p.row_scale:
            scale_a = torch.tensor(0.05, dtype=torch.float32, device=device)
        return self.given(
            x=x,
            weight=weight,
            bias=draw(p.n, dtype=torch.float32) if p.table_rows and not with_positions else None,
            pos_embed=draw(p.table_rows, p.n, dtype=torch.float32) if with_positions else None,
            pos_index=torch.randint(p.table_rows, (p.m,), device=device, dtype=torch.int32) if p.table_index else None,
            scale_a=scale_a,
            scale_b=torch.rand(1, p.n, dtype=torch.float32, device=device) + 0.5 if p.feature_scale else None,
        )

    def shardings(self, shapes: Mapping[str, Shape], parts: int) -> Iterator[Sharding]:
        """Images or rows, positions, features.

        Rows ``[B * S, K]`` with a position embedding count positions from their first row, so that only whole images
        may be divided; features are divided in multiples of the 8 that the operator takes. Multipliers of rows and
        features are divided with them; those of the rows of a 3-D ``x`` as ``[B * S, 1]`` where the parts are equal,
        along B.
        """
        x, n = shapes["x"], shapes["weight"][0]
        indexed, positions = "pos_index" in shapes, shapes.get("pos_embed", (1,))[0]
        row_scale = shapes.get("scale_a", ())
        by_row = math.prod(row_scale) > 1
        flat = by_row and len(row_scale) < len(x)
        rows = {"x": 0} | ({"pos_index": 0} if indexed else {}) | ({"scale_a": 0} if by_row else {})
        if (len(x) == 3 or indexed or x[0] // positions % parts == 0) and not (flat and x[0] % parts):
            yield 0, rows
        if len(x) == 3 and not flat:
            along = {"pos_index": 1} if indexed else {"pos_embed": 0}
            yield 1, {"x": 1} | along | ({"scale_a": 1} if by_row else {})
        if n % (8 * parts) == 0:
            counted = len(x) == 3 or ("pos_embed" in shapes and not indexed)
            by_feature = {"scale_b": 1} if math.prod(shapes.get("scale_b", ())) > 1 else {}
            yield 2 if counted else 1, {"weight": 0, "bias": 0, "pos_embed": 1} | by_feature

    def tuned_problem(self, problem: PatchEmbedProblem) -> PatchEmbedProblem:
        """From where the number for the call comes costs nothing."""
        return dataclasses.replace(problem, scale_source="value")

    def prepare(self, a: PatchEmbedArguments, plan: PatchEmbedPlan) -> Prepared:
        """Pads K, aligns, builds the table, allocates the output."""
        problem = plan.problem
        weight = a.weight
        if not _tma_readable(weight):
            weight = DERIVED.get("weight rows", (a.weight,), lambda: _tma_rows(a.weight, problem.k))
        operands = Operands(
            x=_tma_rows(a.x.view(problem.m, -1), problem.k),
            weight=weight,
            table=rows_table(plan, (a.bias, a.pos_embed), lambda: (a.bias, a.pos_embed)),
            index=None if a.pos_index is None else _int32_index(a.pos_index),
            scale=combine_scales(only_number(a.scale_a), only_number(a.scale_b)) if problem.call_scale else None,
            row_scale=in_kernel_order(a.scale_a),
            feature_scale=in_kernel_order(a.scale_b),
            out=torch.empty(problem.m, problem.n, dtype=torch.bfloat16, device=a.x.device),
        )
        return Prepared(plan, operands, self.output_shape(a))

    def reference(self, a: PatchEmbedArguments) -> torch.Tensor:
        contract = _REFERENCES["f32" if a.config is None else a.config.epilogue]
        index = None if a.pos_index is None else a.pos_index.view(-1)
        scale = combine_scales(only_number(a.scale_a), only_number(a.scale_b))
        scale = a.scale_b * scale if is_vector(a.scale_b) else scale
        row_scale = a.scale_a.reshape(-1, 1) if is_vector(a.scale_a) else None
        rows = a.x.view(-1, a.x.shape[-1])
        return contract(rows, a.weight, a.bias, a.pos_embed, scale, index, row_scale).view(self.output_shape(a))

    def reads(self, name: str, flat: tuple) -> tuple[str, ...]:
        return ("pos_index",) if name == "pos_embed" else super().reads(name, flat)

    def gradients(self, a: PatchEmbedArguments, grad: torch.Tensor, facts) -> dict[str, torch.Tensor]:
        grad, found = grad.flatten(0, -2), {}
        if "bias" in facts.wanted:
            found["bias"] = grad.sum(0, dtype=torch.float32)
        if "pos_embed" in facts.wanted:
            found["pos_embed"] = position_gradient(grad, a.pos_index, facts["pos_embed"].shape)
        sums = scaled(grad, a.scale_a, a.scale_b).to(facts["weight"].dtype)
        if "x" in facts.wanted:
            found["x"] = (sums @ a.weight).view(facts["x"].shape)
        if "weight" in facts.wanted:
            found["weight"] = sums.T @ a.x.flatten(0, -2)
        return found

    def output_shape(self, a: PatchEmbedArguments) -> tuple[int, ...]:
        n = a.weight.shape[0]
        if a.x.dim() == 3:
            return a.x.shape[0], a.x.shape[1], n
        if a.pos_embed is None or a.pos_index is not None:
            return a.x.shape[0], n
        return a.x.shape[0] // a.pos_embed.shape[0], a.pos_embed.shape[0], n

    def output_dtype(self, a: PatchEmbedArguments) -> torch.dtype:
        return torch.bfloat16


PATCH_EMBED = _PatchEmbed()


def _index_problems(x: torch.Tensor, pos_embed: torch.Tensor | None, pos_index: torch.Tensor) -> Iterator[Exception]:
    if pos_embed is None:
        yield ValueError("pos_index is given and pos_embed is not: there is nothing to index")
    if pos_index.shape != x.shape[:-1]:
        yield ValueError(f"pos_index has shape {list(pos_index.shape)}: must be that of x's rows {list(x.shape[:-1])}")
    if pos_index.layout is torch.strided and not pos_index.is_contiguous():
        yield ValueError(f"pos_index has strides {list(pos_index.stride())}: must be contiguous")


def _check_positions(pos_index: torch.Tensor, positions: int) -> None:
    """Checks what metadata does not tell: numbers in host memory, which are there to be looked at."""
    low, high = int(pos_index.min()), int(pos_index.max())
    if low < 0 or high >= positions:
        raise ValueError(f"pos_index has numbers from {low} to {high}: must be 0 to {positions - 1}")


def _tma_readable(rows: torch.Tensor) -> bool:
    """Whether rows are whole 16 bytes and begin on such."""
    return rows.shape[-1] * rows.itemsize % ROW_BYTES == 0 and rows.data_ptr() % ROW_BYTES == 0


def _tma_rows(rows: torch.Tensor, width: int) -> torch.Tensor:
    """``rows`` itself if TMA can read it, otherwise an aligned copy with every row zero-padded to ``width``."""
    if _tma_readable(rows):
        return rows
    padded = torch.zeros(rows.shape[0], width, dtype=rows.dtype, device=rows.device)
    padded[:, : rows.shape[1]] = rows
    return padded


def _int32_index(pos_index: torch.Tensor) -> torch.Tensor:
    """``[rows]`` int32; what does not fit stays no position instead of wrapping round to one."""
    if pos_index.dtype == torch.int64:
        pos_index = pos_index.clamp(-1, 2**31 - 1).to(torch.int32)
    return pos_index.view(-1)
