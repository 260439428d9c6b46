"""`patch_embed`: argument checks, padding and dispatch, registered with torch as one operator.

The Python function only normalises its arguments. Checking, preparation and dispatch live behind the operator
``torch.ops.cute_kernels.patch_embed``, so that `torch.compile` sees one node and a direct call is checked all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch

from cute_kernels import reference
from cute_kernels.config import PatchEmbedConfig, PatchEmbedProblem, Sm90PatchEmbedConfig, Sm100PatchEmbedConfig
from cute_kernels.operations.scales import combine_scales, join_scale, split_scale
from cute_kernels.operations.table import build_table
from cute_kernels.plan import Plan, make_plan
from cute_kernels.runtime import gpu
from cute_kernels.runtime.constants import DERIVED
from cute_kernels.runtime.operands import Operands
from cute_kernels.runtime.repeat import PLAIN_TENSORS, WARM

Backend = Literal["auto", "emulator", "reference"]

_FP8 = torch.float8_e4m3fn
_INDEX_DTYPES = (torch.int32, torch.int64)
_ADDEND_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROW_BYTES = 16  # TMA: global row pitch and base address are multiples of 16 bytes
# Binaries of architecture-specific targets run on no other architecture.
_ARCH_OF_CAPABILITY = {(10, 0): "sm_100a", (9, 0): "sm_90a"}
_CONFIG_TYPES = {kind.__name__: kind for kind in (Sm100PatchEmbedConfig, Sm90PatchEmbedConfig)}
_NUMBER_FIELDS = {
    name: tuple(field.name for field in fields(kind) if not isinstance(field.default, str))
    for name, kind in _CONFIG_TYPES.items()
}
_WORD_FIELDS = {
    name: tuple(field.name for field in fields(kind) if isinstance(field.default, str))
    for name, kind in _CONFIG_TYPES.items()
}
# Looked up once, for the sake of warm calls; see `dispatch_is_intercepted`.
_is_compiling, _is_profiling = torch.compiler.is_compiling, torch.autograd._profiler_enabled
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_functorch_level, _tracing_state = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_REFERENCES = {"f32": reference.patch_embed_f32, "bf16x2": reference.patch_embed_bf16x2}
_SUPPORTED = (
    "supported: CUDA devices of compute capability 10.0 (B200, GB200) and 9.0 (H100, H200), CPU tensors (plain torch, "
    'or the PTX emulator with backend="emulator"), and any torch device with backend="reference"'
)


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
    """FP8 patch embedding: ``out[b, s, :] = scale_a * scale_b * (x[b, s, :] @ weight.T) + bias + pos_embed[s, :]``.

    Args:
        x: ``[B, S, K]`` or ``[B * S, K]`` float8_e4m3fn, contiguous; B >= 1, S >= 1, K >= 1. A slice whose memory does
            not start on 16 bytes is copied, and K that is no multiple of 16 is zero-padded, once per call.
        weight: ``[N, K]`` float8_e4m3fn, contiguous, N a multiple of 8. Padded and aligned likewise, once per weight.
        bias: ``[N]`` BF16, FP16 or FP32, any stride, or None. What the kernel reads of bias, position and weight is
            laid out once and found again by object, memory and autograd's version counter. A write that the counter
            does not see (through ``.data``, a NumPy array that shares the memory, or another library's kernel) leaves
            the old values in use until `cute_kernels.clear_cache` is called.
        pos_embed: ``[S, N]`` BF16, FP16 or FP32, any stride, or None. With a 2-D ``x`` it tells S.
        pos_index: for packed rows of variable length: ``[T]`` (or ``[B, L]`` with a 3-D ``x``) int32 or int64,
            contiguous; row t gets ``pos_embed[pos_index[t]]``, and the result is ``[T, N]`` (``[B, L, N]``). A number
            outside ``0 .. S - 1`` raises ValueError for CPU tensors; on a GPU, where looking would make the host wait,
            it gives a row of NaN. int64 is converted by two small kernels, and such a call is never a warm one.
        scale_a: dequantisation multiplier of ``x``: None (1), a number that is finite and > 0 in FP32, or an FP32
            tensor of one element, which is read on the device and not checked.
        scale_b: dequantisation multiplier of ``weight``, likewise. The kernel applies the FP32 product of both.
        out_dtype: ``torch.bfloat16``.
        config: tunables of the kernel, `Sm100PatchEmbedConfig` for SM100 or `Sm90PatchEmbedConfig` for SM90; None
            takes the plan's default. An illegal one is refused on every backend. The emulator runs the kernel of the
            config's architecture, SM100's without a config.
            ``config.epilogue`` selects the rounding contract on every backend: ``"f32"`` (default) is
            ``bf16(fma32(acc, scale, fp32(bias) + fp32(pos)))``, ``"bf16x2"`` is
            ``bf16(bf16(acc * scale) + bf16(fp32(bias) + fp32(pos)))``.
        backend: ``"auto"``: the compiled kernel for CUDA tensors, plain torch for CPU tensors. ``"emulator"``: the
            compiled PTX, executed on the CPU. ``"reference"``: plain torch on any device.

    Returns:
        ``[B, S, N]`` bfloat16, contiguous. A 2-D ``x`` without ``pos_embed`` has no S: the result is ``[rows, N]``.
        NaN and infinity in any tensor are not looked for and propagate as IEEE 754 says. There is no backward:
        differentiating the result raises NotImplementedError.

    Raises:
        TypeError: an argument of the wrong type, element type or layout.
        ValueError: a wrong shape, stride, device, scale, backend or config value.
        NotImplementedError: row-wise scales, or a device without a kernel.
    """
    direct = backend == "auto" and out_dtype is torch.bfloat16 and not dispatch_is_intercepted()
    gradients = torch.is_grad_enabled()
    if direct:
        out = WARM.run(x, weight, bias, pos_embed, pos_index, scale_a, scale_b, config, gradients=gradients)
        if out is not None:
            return out
    named = (("x", x), ("weight", weight), ("bias", bias), ("pos_embed", pos_embed), ("pos_index", pos_index))
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name in ("x", "weight")):
            raise TypeError(f"{name} is {type(tensor).__name__}, expected torch.Tensor")
    if out_dtype is not torch.bfloat16:
        raise ValueError(f"out_dtype = {out_dtype}, allowed: torch.bfloat16")
    _check_backend(backend)
    number_a, tensor_a = split_scale("scale_a", scale_a)
    number_b, tensor_b = split_scale("scale_b", scale_b)
    encoded_config = _encode_config(config)
    tensors = (x, weight, bias, pos_embed, pos_index, tensor_a, tensor_b)
    if direct and x.is_cuda and all(t is None or is_plain(t, gradients) for t in tensors):
        return _execute(x, weight, bias, pos_embed, pos_index, scale_a, scale_b, backend, config)
    return torch.ops.cute_kernels.patch_embed(*tensors, number_a, number_b, backend, *encoded_config)


def dispatch_is_intercepted() -> bool:
    """Whether something traces or intercepts operators: `torch.compile`, export, modes, functorch, the profiler.

    Otherwise, and unless the result would need a gradient, which the operator refuses on backward, the dispatcher would
    do nothing but call `_execute`, and take tens of microseconds for it.
    """
    return bool(
        _is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _functorch_level() is not None
        or _tracing_state() is not None
        or _is_profiling()
    )


def is_plain(tensor: torch.Tensor, gradients: bool) -> bool:
    return type(tensor) in PLAIN_TENSORS and not (gradients and tensor.requires_grad)


def _encode_config(config: PatchEmbedConfig | None) -> tuple[str | None, list[int], str]:
    """Operator schemas have no dataclasses: a config travels as type name, integers, words."""
    if config is None:
        return None, [], ""
    for name, kind in _CONFIG_TYPES.items():
        if type(config) is kind:
            numbers = [getattr(config, field) for field in _NUMBER_FIELDS[name]]
            return name, numbers, ",".join([getattr(config, field) for field in _WORD_FIELDS[name]])
    allowed = ", ".join(f"cute_kernels.{name}" for name in _CONFIG_TYPES)
    raise TypeError(f"config is {type(config).__name__}, expected {allowed} or None")


def _decode_config(name: str | None = None, numbers: Sequence[int] = (), words: str = "") -> PatchEmbedConfig | None:
    return None if name is None else _decoded_config(name, tuple(numbers), words)


@functools.cache
def _decoded_config(name: str, numbers: tuple[int, ...], words: str) -> PatchEmbedConfig:
    """Cached, since a warm call is found by the identity of its config."""
    if name not in _CONFIG_TYPES:
        raise ValueError(f"config_type = {name!r}, allowed: {', '.join(map(repr, _CONFIG_TYPES))}")
    names, values = (*_NUMBER_FIELDS[name], *_WORD_FIELDS[name]), (*numbers, *words.split(","))
    if len(names) != len(values):
        raise ValueError(f"config_type = {name!r} takes {', '.join(names)}, given {list(numbers)} and {words!r}")
    return _CONFIG_TYPES[name](**dict(zip(names, values, strict=True)))


# --- checks ----------------------------------------------------------------------------------------------------------


def _check_tensors(x, weight, bias, pos_embed, pos_index, scale_a, scale_b) -> None:
    """Everything about the tensors that can be told from their metadata; also runs on fake tensors."""
    named = (("x", x), ("weight", weight), ("bias", bias), ("pos_embed", pos_embed), ("pos_index", pos_index))
    for name, tensor in named:
        if tensor is not None and tensor.layout is not torch.strided:
            raise TypeError(f"{name} has layout {tensor.layout}, allowed: {torch.strided}")
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype != _FP8:
            raise TypeError(f"{name} has dtype {tensor.dtype}, allowed: {_FP8}")
    if x.dim() not in (2, 3):
        raise ValueError(f"x has shape {list(x.shape)}, allowed: [B, S, K] or [B * S, K]")
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {list(weight.shape)}, allowed: [N, K]")
    for name, tensor in (("x", x), ("weight", weight)):
        if 0 in tensor.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: every extent must be at least 1")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} has strides {list(tensor.stride())} for shape {list(tensor.shape)}, allowed: contiguous "
                f"(use {name}.contiguous())"
            )
    n, k = weight.shape
    if x.shape[-1] != k:
        raise ValueError(f"x has K = {x.shape[-1]} and weight has K = {k}: they must be equal")
    if n % 8:
        raise ValueError(f"weight has N = {n}, allowed: multiples of 8, nearest {max(8, n - n % 8)} or {n + 8 - n % 8}")
    rows = x.numel() // k

    for name, tensor in (("bias", bias), ("pos_embed", pos_embed)):
        if tensor is not None and tensor.dtype not in _ADDEND_DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}, allowed: {', '.join(map(str, _ADDEND_DTYPES))}")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"bias has shape {list(bias.shape)}, allowed: [N] = [{n}]")
    if pos_embed is not None:
        if pos_embed.dim() != 2 or pos_embed.shape[1] != n or pos_embed.shape[0] == 0:
            raise ValueError(f"pos_embed has shape {list(pos_embed.shape)}, allowed: [S, N] with N = {n} and S >= 1")
    if pos_index is not None:
        _check_index(x, pos_embed, pos_index)
    elif pos_embed is not None:
        positions = pos_embed.shape[0]
        if x.dim() == 3 and x.shape[1] != positions:
            raise ValueError(f"pos_embed has S = {positions} and x has S = {x.shape[1]}: they must be equal")
        if x.dim() == 2 and rows % positions:
            raise ValueError(f"x has {rows} rows, allowed: a multiple of pos_embed's S = {positions}")

    for name, scale, along in (("scale_a", scale_a, (rows, 1)), ("scale_b", scale_b, (1, n))):
        if scale is None:
            continue
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {scale.dtype}, allowed: torch.float32")
        if scale.numel() != 1 and tuple(scale.shape) == along:
            raise NotImplementedError(
                f"{name} has shape {list(scale.shape)}: row-wise scales are planned as a second operand of the "
                "epilogue, applied before bias and pos_embed, and do not exist yet; allowed: one element"
            )
        if scale.numel() != 1:
            raise ValueError(f"{name} has shape {list(scale.shape)}, allowed: a tensor of one element")

    others = (("weight", weight), ("bias", bias), ("pos_embed", pos_embed), ("pos_index", pos_index))
    for name, tensor in (*others, ("scale_a", scale_a), ("scale_b", scale_b)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} and x is on {x.device}: they must be on one device")


def _check_index(x: torch.Tensor, pos_embed: torch.Tensor | None, pos_index: torch.Tensor) -> None:
    if pos_embed is None:
        raise ValueError("pos_index is given and pos_embed is not: there is nothing to index")
    if pos_index.dtype not in _INDEX_DTYPES:
        raise TypeError(f"pos_index has dtype {pos_index.dtype}, allowed: {', '.join(map(str, _INDEX_DTYPES))}")
    if pos_index.shape != x.shape[:-1]:
        raise ValueError(f"pos_index has shape {list(pos_index.shape)}, allowed: that of x's rows {list(x.shape[:-1])}")
    if not pos_index.is_contiguous():
        raise ValueError(f"pos_index has strides {list(pos_index.stride())}, allowed: contiguous")


def _check_positions(pos_index: torch.Tensor, positions: int) -> None:
    """What `_check_tensors` cannot see: numbers in host memory, which are there to be looked at."""
    low, high = int(pos_index.min()), int(pos_index.max())
    if low < 0 or high >= positions:
        raise ValueError(f"pos_index has numbers from {low} to {high}, allowed: 0 to {positions - 1}")


def _output_shape(
    x: torch.Tensor, weight: torch.Tensor, pos_embed: torch.Tensor | None, pos_index: torch.Tensor | None
) -> tuple[int, ...]:
    n = weight.shape[0]
    if x.dim() == 3:
        return x.shape[0], x.shape[1], n
    if pos_embed is None or pos_index is not None:
        return x.shape[0], n
    return x.shape[0] // pos_embed.shape[0], pos_embed.shape[0], n


def _check_backend(backend: str) -> None:
    if backend not in get_args(Backend):
        raise ValueError(f"backend = {backend!r}, allowed: {', '.join(map(repr, get_args(Backend)))}")


def choose_backend(device: torch.device, backend: str) -> Literal["kernel", "emulator", "reference"]:
    """What executes a call whose tensors are on ``device``.

    Raises:
        ValueError: unknown backend, or the emulator asked to read device memory.
        NotImplementedError: no kernel for this device.
    """
    _check_backend(backend)
    if backend == "reference":
        return "reference"
    if backend == "emulator":
        if device.type != "cpu":
            raise ValueError(f'backend = "emulator" with tensors on {device}: the emulator reads CPU tensors')
        return "emulator"
    if device.type == "cpu":
        return "reference"
    if device.type != "cuda" or torch.version.hip is not None:
        raise NotImplementedError(f"no kernel for device {device}; {_SUPPORTED}")
    if torch.cuda.get_device_capability(device) not in _ARCH_OF_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise NotImplementedError(
            f"no kernel for {torch.cuda.get_device_name(device)} (compute capability {major}.{minor}); {_SUPPORTED}"
        )
    return "kernel"


# --- preparation -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreparedLaunch:
    """A checked call, ready for `cute_kernels.runtime`: the plan and the operands it reads and writes.

    ``tensors.out`` is ``[rows, N]``; viewed as ``output_shape`` it is what `patch_embed` returns.
    """

    plan: Plan
    tensors: Operands
    output_shape: tuple[int, ...]


def prepare_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
    scale: float | torch.Tensor,
    config: PatchEmbedConfig | None,
    pos_index: torch.Tensor | None = None,
) -> PreparedLaunch:
    """Plan the call and lay out its operands: pad K, align, build the table, allocate the output.

    Args:
        x, weight, bias, pos_embed, config, pos_index: as for `patch_embed`.
        scale: ``scale_a * scale_b``, already multiplied: a number, or an FP32 tensor of one element on x's device.

    Raises:
        As `patch_embed`; ValueError if the plan refuses the config, TypeError if it is another architecture's.
    """
    _check_tensors(x, weight, bias, pos_embed, pos_index, None, None)
    n, k = weight.shape
    rows = x.numel() // k
    problem = _problem_of(x, weight, bias, pos_embed, pos_index, scale)
    arch, sm_count = device_facts(x.get_device()) if x.is_cuda else (None, None)
    plan = make_plan(problem, config, arch, sm_count=sm_count)

    table = None
    if problem.table_rows:
        dtype = getattr(torch, plan.table_dtype)
        table = DERIVED.get(
            ("table", plan.table_shape, dtype, problem.table_index),
            (bias, pos_embed),
            lambda: build_table(
                bias,
                pos_embed,
                positions=problem.table_rows,
                columns=plan.padded_n,
                dtype=dtype,
                layout=plan.table_layout,
                nan_row=problem.table_index,
            ),
        )
        if tuple(table.shape) != tuple(plan.table_shape):
            raise AssertionError(f"table {list(table.shape)} does not match the plan's {list(plan.table_shape)}")
    weight_rows = weight
    if not _tma_readable(weight):
        weight_rows = DERIVED.get("weight rows", (weight,), lambda: _tma_rows(weight, problem.k))
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
    tensors = Operands(
        x=_tma_rows(x.view(rows, k), problem.k),
        weight=weight_rows,
        table=table,
        scale=scale,
        out=out,
        index=None if pos_index is None else _int32_index(pos_index),
    )
    return PreparedLaunch(plan, tensors, _output_shape(x, weight, pos_embed, pos_index))


def _problem_of(x, weight, bias, pos_embed, pos_index, scale: float | torch.Tensor) -> PatchEmbedProblem:
    n, k = weight.shape
    positions = pos_embed.shape[0] if pos_embed is not None else 1
    return PatchEmbedProblem(
        m=x.numel() // k,
        n=n,
        k=-(-k // _ROW_BYTES) * _ROW_BYTES,
        table_rows=0 if bias is None and pos_embed is None else positions,
        scale_source="pointer" if isinstance(scale, torch.Tensor) else "value",
        table_index=pos_index is not None,
    )


@functools.cache
def device_facts(index: int) -> tuple[str, int]:
    """Architecture and multiprocessors of a CUDA device that has a kernel."""
    architecture = _ARCH_OF_CAPABILITY[torch.cuda.get_device_capability(index)]
    return architecture, torch.cuda.get_device_properties(index).multi_processor_count


def _int32_index(pos_index: torch.Tensor) -> torch.Tensor:
    """``[rows]`` int32; what does not fit stays no position instead of wrapping round to one."""
    if pos_index.dtype == torch.int64:
        pos_index = pos_index.clamp(-1, 2**31 - 1).to(torch.int32)
    return pos_index.view(-1)


def _tma_readable(rows: torch.Tensor) -> bool:
    return rows.shape[-1] % _ROW_BYTES == 0 and rows.data_ptr() % _ROW_BYTES == 0


def _tma_rows(rows: torch.Tensor, width: int) -> torch.Tensor:
    """``rows`` itself if TMA can read it, otherwise an aligned copy with every row zero-padded to ``width``."""
    if _tma_readable(rows):
        return rows
    padded = torch.zeros(rows.shape[0], width, dtype=rows.dtype, device=rows.device)
    padded[:, : rows.shape[1]] = rows
    return padded


# --- the operator ----------------------------------------------------------------------------------------------------


def _patch_embed(
    x, weight, bias, pos_embed, pos_index, tensor_a, tensor_b, number_a, number_b, backend, *encoded_config
):
    config = _decode_config(*encoded_config)
    scale_a, scale_b = join_scale(number_a, tensor_a), join_scale(number_b, tensor_b)
    if backend == "auto":  # gradients are the dispatcher's matter here
        out = WARM.run(x, weight, bias, pos_embed, pos_index, scale_a, scale_b, config, gradients=False)
        if out is not None:
            return out
    return _execute(x, weight, bias, pos_embed, pos_index, scale_a, scale_b, backend, config)


def _execute(x, weight, bias, pos_embed, pos_index, scale_a, scale_b, backend, config) -> torch.Tensor:
    tensors = (scale if isinstance(scale, torch.Tensor) else None for scale in (scale_a, scale_b))
    _check_tensors(x, weight, bias, pos_embed, pos_index, *tensors)
    if pos_index is not None and pos_index.device.type == "cpu":
        _check_positions(pos_index, pos_embed.shape[0])
    executor = choose_backend(x.device, backend)
    scale = combine_scales(scale_a, scale_b)
    if executor == "reference":
        if config is not None:
            # A call that no kernel could run must not pass where it is tried without one.
            make_plan(_problem_of(x, weight, bias, pos_embed, pos_index, scale), config)
        contract = _REFERENCES["f32" if config is None else config.epilogue]
        rows = x.view(-1, x.shape[-1])
        index = None if pos_index is None else pos_index.view(-1)
        out = contract(rows, weight, bias, pos_embed, scale, index)
        return out.view(_output_shape(x, weight, pos_embed, pos_index))

    prepared = prepare_launch(x, weight, bias, pos_embed, scale, config, pos_index)
    if executor == "emulator":
        import cute_kernels.runtime.emulated as emulated

        emulated.launch(prepared.plan, prepared.tensors)
    else:
        gpu.launch(prepared.plan, prepared.tensors)
        WARM.remember(x, (weight, bias, pos_embed), pos_index, (scale_a, scale_b), config, prepared)
    return prepared.tensors.out.view(prepared.output_shape)


def _patch_embed_fake(
    x, weight, bias, pos_embed, pos_index, tensor_a, tensor_b, number_a, number_b, backend, *encoded_config
):
    _check_tensors(x, weight, bias, pos_embed, pos_index, tensor_a, tensor_b)
    return x.new_empty(_output_shape(x, weight, pos_embed, pos_index), dtype=torch.bfloat16)


def _no_backward(ctx, grad):
    raise NotImplementedError("cute_kernels.patch_embed has no backward: call it under torch.no_grad()")


_library = torch.library.Library("cute_kernels", "FRAGMENT")
_library.define(
    "patch_embed(Tensor x, Tensor weight, Tensor? bias, Tensor? pos_embed, Tensor? pos_index, Tensor? scale_a, "
    "Tensor? scale_b, float scale_a_value, float scale_b_value, str backend, str? config_type=None, "
    "int[] config_numbers=[], str config_words='') -> Tensor",
    # The kernel reads rows through TMA: a compiler must not hand it other strides than the program had.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.impl("patch_embed", _patch_embed, "CompositeExplicitAutograd")
torch.library.register_fake("cute_kernels::patch_embed", _patch_embed_fake, lib=_library)
torch.library.register_autograd("cute_kernels::patch_embed", _no_backward, lib=_library)
