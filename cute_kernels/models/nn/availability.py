"""Availability of a kernel, asked before a call instead of caught after it."""

import functools

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from cute_kernels import plan
from cute_kernels.config import GemmProblem, PatchEmbedImagesProblem, name_of
from cute_kernels.operations.arguments import ON_DEVICE, choose_backend
from cute_kernels.operations.runtime import devices
from cute_kernels.plan.images import multiplied_type

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_mode, _MODES = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
_REASONS: dict[tuple[torch.device, str], str | None] = {}

KEPT_IN_EXPORT = False
"""Whether exported graphs have this package's operator, see `cute_kernels.models.nn.kernels_in_export`."""


def exporting() -> bool:
    """`torch.compiler.is_exporting`, which the compiler of torch 2.11 takes for true in whatever it compiles."""
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag


def traced() -> bool:
    """Whether a graph is made in which an embedding is one operator, so that nothing may depend on numbers."""
    return torch.compiler.is_compiling() or (KEPT_IN_EXPORT and exporting())


def plain_torch_wanted() -> bool:
    """Whether plain torch has to run, whatever the tensors are: a graph is made of it (`torch.jit.trace`,
    `torch.export`, ``make_fx``), or operations give no numbers, be it of real tensors (`FakeTensorMode`)."""
    if torch.jit.is_tracing() or (exporting() and not KEPT_IN_EXPORT):
        return True
    return not traced() and (_mode(_MODES.FAKE) is not None or _mode(_MODES.PROXY) is not None)


def in_graph() -> bool:
    """Whether a graph is made, of this package's operators or of plain torch: nothing is kept from call to call."""
    return traced() or plain_torch_wanted()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has numbers in strided memory: no subclass (a `FakeTensor`, say), nothing on the meta device."""
    numbers = type(tensor) in _PLAIN_TYPES or (traced() and isinstance(tensor, FakeTensor))
    return numbers and not tensor.is_meta and tensor.layout is torch.strided


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether `torch.func` or forward-mode autograd follows a tensor: operations without such a rule would lose it. Not
    asked of a call that is `traced`, which keeps its graph whole."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    # Unpacking takes time; torch's own test in front of it is a level that does without a name.
    in_level = getattr(forward_ad, "_current_level", 0) >= 0
    return in_level and forward_ad.unpack_dual(tensor).tangent is not None


@torch.compiler.assume_constant_result
def no_device(device: torch.device, backend: str) -> str | None:
    """Why nothing of this package runs on a device, or None."""
    if (device, backend) not in _REASONS:
        try:
            choose_backend(device, backend)
        except NotImplementedError as error:
            _REASONS[device, backend] = str(error)
        else:
            _REASONS[device, backend] = None
    return _REASONS[device, backend]


@torch.compiler.assume_constant_result
def no_product(device: torch.device, backend: str, precision: str | None) -> str | None:
    """Why no kernel multiplies rows of a precision on a device, or None: not all GPUs with kernels multiply E4M3."""
    if precision != "fp8" or choose_backend(device, backend) not in ON_DEVICE:
        return None
    arch, _ = devices.device_facts(torch.cuda.current_device() if device.index is None else device.index)
    return None if _multiplies_e4m3(arch) else f"no kernel multiplies E4M3 on {device}, an {arch}"


@functools.lru_cache
def _multiplies_e4m3(arch: str) -> bool:
    try:
        return bool(plan.make_plan(GemmProblem(128, 128, 128, in_dtype="float8_e4m3fn"), None, arch))
    except ValueError:
        return False


@torch.compiler.disable
def images_out_dtype(
    images: torch.Tensor, patch: int, features: int, precision: str, wanted: torch.dtype, backend: str
) -> torch.dtype | None:
    """The type in which `cute_kernels.patch_embed_images` can give a result that is to be ``wanted``, or None.

    int8's is bfloat16 whatever is wanted, which is what its kernels write, and of the references, too: so its results
    have the same bits on every device. Floating-point precisions get None where the kernel has bfloat16 alone: a
    product of rows gives the type that is wanted, without a rounding to bfloat16 on the way.
    """
    if precision == "int8":
        wanted = torch.bfloat16
    executor = choose_backend(images.device, backend)
    if executor == "reference" or not images.shape[0]:
        return wanted
    arch = sm_count = None
    if executor in ON_DEVICE:
        index = images.device.index
        arch, sm_count = devices.device_facts(torch.cuda.current_device() if index is None else index)
    facts = tuple(images.shape), images.dtype, patch, features, precision, wanted
    return wanted if _has_kernel(*facts, arch, sm_count) else None


@functools.lru_cache(maxsize=4096)
def _has_kernel(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    patch: int,
    features: int,
    precision: str,
    out_dtype: torch.dtype,
    arch: str | None,
    sm_count: int | None,
) -> bool:
    """Remembered, for a module asks in every call, and planning takes longer than the kernel does for a few images."""
    batch, channels, height, width = shape
    problem = PatchEmbedImagesProblem(
        batch=batch,
        channels=channels,
        height=height,
        width=width,
        patch=patch,
        n=features,
        in_dtype=multiplied_type(name_of(dtype), precision),
        precision=precision,
        table_rows=height // patch * (width // patch),
        out_dtype=name_of(out_dtype),
    )
    try:
        plan.make_plan(problem, None, arch, sm_count=sm_count)
    except (ValueError, NotImplementedError):
        return False
    return True
