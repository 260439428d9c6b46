"""`gemm`: argument checks, alignment and dispatch, registered with torch as one operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from cute_kernels import reference
from cute_kernels.config import GemmConfig, GemmProblem, Sm90GemmConfig, Sm100GemmConfig
from cute_kernels.operations.patch_embed import Backend, choose_backend, device_facts, dispatch_is_intercepted, is_plain
from cute_kernels.plan import GemmPlan, make_plan
from cute_kernels.runtime import gpu
from cute_kernels.runtime.constants import DERIVED
from cute_kernels.runtime.operands import Operands
from cute_kernels.tuning import store as tuned

_IN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CONFIG_TYPES = {kind.__name__: kind for kind in (Sm100GemmConfig, Sm90GemmConfig)}
_ALIGNMENT = 16  # bytes, of a TMA address and of a row


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    backend: Backend = "auto",
    allow_tf32: bool = False,
) -> torch.Tensor:
    """Dense product ``a @ b.T + bias``, in the layout of `torch.nn.functional.linear`, accumulated in FP32.

    The accumulator is rounded once per tensor-core instruction of 16 elements of K (8 of TF32); FP32 ``bias`` is added
    with one rounding and the sum is rounded once to ``out_dtype``: `cute_kernels.reference.gemm` says the same in plain
    torch, and what the ``split_k`` of a config changes in the order of the additions. Of float32 operands the tensor
    core multiplies TF32, which has FP32's range and 11 significant bits: every element is rounded to the nearest one
    first, ties to even.

    Args:
        a: ``[M, K]`` or ``[B, M, K]`` bfloat16, float16 or, with ``allow_tf32``, float32, contiguous; every extent at
            least 1, K a multiple of 8, or of 4 in float32 (TMA reads rows of whole 16 bytes). A slice whose memory does
            not start on 16 bytes is copied.
        b: ``[N, K]`` of the same type, for all of a batch, or ``[B, N, K]``.
        bias: ``[N]`` BF16, FP16 or FP32, any stride, or None. It is converted to FP32 once and found again by object,
            memory and autograd's version counter. A write that the counter does not see (through ``.data``, a NumPy
            array that shares the memory, or another library's kernel) leaves the old values in use until
            `cute_kernels.clear_cache` is called.
        out_dtype: bfloat16, float16 or float32; the type of ``a`` when None.
        config: tunables of the kernel, `Sm100GemmConfig` or `Sm90GemmConfig`; None takes what
            `cute_kernels.tune_gemm` found for this problem, or chooses by size. The emulator runs the kernel of the
            config's architecture, SM100's without a config.
        backend: ``"auto"``: the compiled kernel for CUDA tensors, plain torch for CPU tensors. ``"emulator"``: the
            compiled PTX, executed on the CPU. ``"reference"``: plain torch on any device.
        allow_tf32: accepts float32 operands although 13 of their 24 significant bits are lost; of no effect on others.

    Returns:
        ``[M, N]`` or ``[B, M, N]`` in ``out_dtype``, contiguous. N whose rows are no multiple of 16 bytes costs a copy.
        There is no backward: differentiating the result raises NotImplementedError.

    Raises:
        TypeError: an argument of the wrong type or element type, float32 without ``allow_tf32`` among them.
        ValueError: a wrong shape, stride, device, backend or config value.
        NotImplementedError: a device without a kernel.
    """
    for name, tensor in (("a", a), ("b", b), ("bias", bias)):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name != "bias"):
            raise TypeError(f"{name} is {type(tensor).__name__}, expected torch.Tensor")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is {type(out_dtype).__name__}, expected torch.dtype or None")
    if not isinstance(allow_tf32, bool):
        raise TypeError(f"allow_tf32 is {type(allow_tf32).__name__}, expected bool")
    if backend == "auto" and a.is_cuda and not dispatch_is_intercepted():
        # The dispatcher would do nothing but call `_gemm`, unless the result needed a gradient.
        gradients = torch.is_grad_enabled()
        if all(tensor is None or is_plain(tensor, gradients) for tensor in (a, b, bias)):
            return _warm(a, b, bias, out_dtype, config, allow_tf32)
    return torch.ops.cute_kernels.gemm(a, b, bias, out_dtype, backend, *_encode_config(config), allow_tf32)


def _encode_config(config: GemmConfig | None) -> tuple[str | None, list[int]]:
    """Operator schemas have no dataclasses: a config travels as type name and integers."""
    if config is None:
        return None, []
    if type(config) not in _CONFIG_TYPES.values():
        allowed = ", ".join(f"cute_kernels.{name}" for name in _CONFIG_TYPES)
        raise TypeError(f"config is {type(config).__name__}, expected {allowed} or None")
    return type(config).__name__, [int(value) for value in dataclasses.astuple(config)]


def _decode_config(name: str | None, numbers: Sequence[int]) -> GemmConfig | None:
    if name is None:
        return None
    if name not in _CONFIG_TYPES:
        raise ValueError(f"config_type = {name!r}, allowed: {', '.join(map(repr, _CONFIG_TYPES))}")
    fields = dataclasses.fields(_CONFIG_TYPES[name])
    if len(fields) != len(numbers):
        names = ", ".join(field.name for field in fields)
        raise ValueError(f"config_type = {name!r} takes {names}, given {list(numbers)}")
    return _CONFIG_TYPES[name](*numbers)


# --- checks ----------------------------------------------------------------------------------------------------------


def _check(a, b, bias, out_dtype, allow_tf32) -> None:
    """Everything that can be told from metadata; also runs on fake tensors."""
    for name, tensor in (("a", a), ("b", b), ("bias", bias)):
        if tensor is not None and tensor.layout is not torch.strided:
            raise TypeError(f"{name} has layout {tensor.layout}, allowed: {torch.strided}")
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dtype not in _IN_DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}, allowed: {', '.join(map(str, _IN_DTYPES))}")
    if a.dtype is torch.float32 and not allow_tf32:
        raise TypeError(
            "a has dtype torch.float32, of which the tensor core would multiply 11 of 24 significant bits (TF32), "
            "allowed: torch.bfloat16, torch.float16, or torch.float32 with allow_tf32=True"
        )
    if a.dtype != b.dtype:
        raise TypeError(f"a has dtype {a.dtype} and b has dtype {b.dtype}: they must be equal")
    if out_dtype is not None and out_dtype not in _OUT_DTYPES:
        raise ValueError(f"out_dtype = {out_dtype}, allowed: {', '.join(map(str, _OUT_DTYPES))}")
    if a.dim() not in (2, 3):
        raise ValueError(f"a has shape {list(a.shape)}, allowed: [M, K] or [B, M, K]")
    if b.dim() not in (2, a.dim()):
        allowed = "[N, K]" if a.dim() == 2 else "[N, K] or [B, N, K]"
        raise ValueError(f"b has shape {list(b.shape)}, allowed beside a {list(a.shape)}: {allowed}")
    for name, tensor in (("a", a), ("b", b)):
        if 0 in tensor.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: every extent must be at least 1")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} has strides {list(tensor.stride())} for shape {list(tensor.shape)}, allowed: contiguous "
                f"(use {name}.contiguous())"
            )
    if b.dim() == 3 and a.shape[0] != b.shape[0]:
        raise ValueError(f"a has B = {a.shape[0]} and b has B = {b.shape[0]}: they must be equal")
    n, k = b.shape[-2:]
    if a.shape[-1] != k:
        raise ValueError(f"a has K = {a.shape[-1]} and b has K = {k}: they must be equal")
    step = _ALIGNMENT // a.itemsize
    if k % step:
        nearest = " or ".join(str(value) for value in (k - k % step, k + step - k % step) if value)
        raise ValueError(
            f"a has K = {k}, allowed: multiples of {step}, since TMA reads rows of whole 16 bytes; nearest {nearest}"
        )
    if bias is not None:
        if bias.dtype not in _OUT_DTYPES:
            raise TypeError(f"bias has dtype {bias.dtype}, allowed: {', '.join(map(str, _OUT_DTYPES))}")
        if tuple(bias.shape) != (n,):
            raise ValueError(f"bias has shape {list(bias.shape)}, allowed: [N] = [{n}]")
    for name, tensor in (("b", b), ("bias", bias)):
        if tensor is not None and tensor.device != a.device:
            raise ValueError(f"{name} is on {tensor.device} and a is on {a.device}: they must be on one device")


# --- preparation and dispatch ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PreparedGemm:
    """A checked call, ready for `cute_kernels.runtime`: the plan and the operands it reads and writes."""

    plan: GemmPlan
    tensors: Operands

    def result(self, shape: tuple[int, ...]) -> torch.Tensor:
        """The output without the padding of its rows, contiguous."""
        return self.tensors.out[..., : self.plan.problem.n].contiguous().view(shape)


def prepare_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    allow_tf32: bool = False,
) -> PreparedGemm:
    """Plans a call and lays out its operands; arguments and errors as `gemm`, and ValueError for an illegal config."""
    _check(a, b, bias, out_dtype, allow_tf32)
    plan = _plan(a, b, bias, out_dtype, config, a.device)
    problem = plan.problem
    batches, n, k = problem.batches, problem.n, problem.k
    padded = None
    if bias is not None:
        padded = _prepared_bias(bias, plan.padded_n)
    out = torch.empty(batches, problem.m, plan.out_pitch, dtype=getattr(torch, problem.out_dtype), device=a.device)
    rows, weight = _aligned(a).view(batches, problem.m, k), _aligned(b).view(batches, n, k)
    tensors = Operands(a=rows, b=weight, bias=padded, out=out)
    return PreparedGemm(plan, tensors)


def _plan(a, b, bias, out_dtype, config, device: torch.device | None) -> GemmPlan:
    """For a CUDA device that has a kernel; otherwise for the architecture of the config, SM100 without one.

    Without a config: what `cute_kernels.tune_gemm` found on this kind of device, or else the plan's choice.
    """
    n, k = b.shape[-2:]
    batches = a.shape[0] if b.dim() == 3 else 1
    dtypes = (str(dtype).removeprefix("torch.") for dtype in (a.dtype, out_dtype or a.dtype))
    problem = GemmProblem(a.numel() // (batches * k), n, k, batches, *dtypes, bias is not None)
    on_gpu = device is not None and device.type == "cuda"
    if not on_gpu:
        return make_plan(problem, config)
    arch, sm_count = device_facts(a.get_device())
    if config is None:
        config = tuned.lookup(problem, tuned.Device(torch.cuda.get_device_name(a.get_device()), arch, sm_count))
    return make_plan(problem, config, arch, sm_count=sm_count)


def _prepared_bias(bias: torch.Tensor, columns: int) -> torch.Tensor:
    """FP32 with zeros up to ``columns``, kept while the bias lives unchanged."""

    def build() -> torch.Tensor:
        return torch.nn.functional.pad(bias.detach().to(torch.float32), (0, columns - bias.shape[0]))

    return DERIVED.get(("gemm bias", columns), (bias,), build)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def _output_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    return (*a.shape[:-1], b.shape[-2])


@dataclasses.dataclass(frozen=True)
class _WarmCall:
    """What is known of calls of one shape: the kernel with sizes filled in, columns of the bias, memory of the output.

    ``like_output`` has the result's shape, type and device in memory of one element.
    """

    launch: Callable[..., None]
    padded_n: int
    like_output: torch.Tensor


_WARM: dict[tuple, _WarmCall] = {}
_WARM_CAPACITY = 1024


def _warm(a, b, bias, out_dtype, config, allow_tf32) -> torch.Tensor:
    """A call on CUDA tensors without the dispatcher; the second one of a shape without checks and planning."""
    device = a.get_device()
    like_bias = None if bias is None else (bias.shape, bias.dtype, bias.get_device())
    key = (a.shape, b.shape, a.dtype, b.dtype, like_bias, out_dtype, config, allow_tf32, device, b.get_device())
    call = _WARM.get(key)
    if (
        call is None
        or (a.data_ptr() | b.data_ptr()) % _ALIGNMENT
        or not (a.is_contiguous() and b.is_contiguous())
        or torch.cuda.current_device() != device
    ):
        return _long_way(key, a, b, bias, out_dtype, config, allow_tf32)
    padded = None if bias is None else _prepared_bias(bias, call.padded_n)
    out = torch.empty_like(call.like_output, memory_format=torch.contiguous_format)
    address = None if padded is None else padded.data_ptr()
    call.launch(a.data_ptr(), b.data_ptr(), address, out.data_ptr(), torch._C._cuda_getCurrentRawStream(device))
    return out


def forget_calls() -> None:
    """Every call is planned anew: another configuration may have become the default."""
    _WARM.clear()


def _long_way(key: tuple, a, b, bias, out_dtype, config, allow_tf32) -> torch.Tensor:
    """As `_gemm` on CUDA tensors; remembers the call if its output needs no padding."""
    _encode_config(config)
    choose_backend(a.device, "auto")
    prepared = prepare_gemm(a, b, bias, out_dtype, config, allow_tf32)
    gpu.launch(prepared.plan, prepared.tensors)
    out = prepared.result(_output_shape(a, b))
    # Memory of a graph's own pool must not outlive the graph.
    if prepared.plan.out_pitch == prepared.plan.problem.n and not torch.cuda.is_current_stream_capturing():
        if len(_WARM) >= _WARM_CAPACITY:
            _WARM.clear()
        bound = gpu.bound_launch(prepared.plan).with_constants(("a", "b", "bias", "out", "stream"))
        _WARM[key] = _WarmCall(bound, prepared.plan.padded_n, out.new_empty(1).expand(out.shape))
    return out


def _gemm(a, b, bias, out_dtype, backend, config_type=None, config_numbers=(), allow_tf32=False):
    _check(a, b, bias, out_dtype, allow_tf32)
    config = _decode_config(config_type, config_numbers)
    executor = choose_backend(a.device, backend)
    if executor == "reference":
        if config is not None:
            _plan(a, b, bias, out_dtype, config, device=None)  # an illegal configuration is one on every backend
        rows = a.view(-1, a.shape[-1]) if b.dim() == 2 else a
        return reference.gemm(rows, b, bias, out_dtype, getattr(config, "split_k", 1)).view(_output_shape(a, b))

    prepared = prepare_gemm(a, b, bias, out_dtype, config, allow_tf32)
    if executor == "emulator":
        import cute_kernels.runtime.emulated as emulated

        emulated.launch(prepared.plan, prepared.tensors)
    else:
        gpu.launch(prepared.plan, prepared.tensors)
    return prepared.result(_output_shape(a, b))


def _gemm_fake(a, b, bias, out_dtype, backend, config_type=None, config_numbers=(), allow_tf32=False):
    _check(a, b, bias, out_dtype, allow_tf32)
    return a.new_empty(_output_shape(a, b), dtype=out_dtype or a.dtype)


def _no_backward(ctx, grad):
    raise NotImplementedError("cute_kernels.gemm has no backward: call it under torch.no_grad()")


_library = torch.library.Library("cute_kernels", "FRAGMENT")
_library.define(
    "gemm(Tensor a, Tensor b, Tensor? bias, ScalarType? out_dtype, str backend, str? config_type=None, "
    "int[] config_numbers=[], bool allow_tf32=False) -> Tensor",
    # The kernel reads rows through TMA: a compiler must not hand it other strides than the program had.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.impl("gemm", _gemm, "CompositeExplicitAutograd")
torch.library.register_fake("cute_kernels::gemm", _gemm_fake, lib=_library)
torch.library.register_autograd("cute_kernels::gemm", _no_backward, lib=_library)
