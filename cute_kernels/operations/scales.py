"""The two dequantisation multipliers of a call, and their product, which is what a kernel applies; an output's scale.

A multiplier is one number, or FP32 numbers for every row or every feature. Those that are one number are multiplied
before the launch; a kernel multiplies the product with the others.

Numbers are checked: each, and the product, must be finite and greater than 0 in FP32. A tensor's value is read on the
device and never checked, since looking at it would wait for the device; NaN or infinity in it reaches the output.
"""

import ctypes
import functools
import numbers
from collections.abc import Iterator

import torch

# A number strictly between these rounds to a finite FP32 number greater than 0: half the smallest subnormal, and the
# middle between the largest number and 2**128.
_FP32_OVERFLOW = (2.0 - 2.0**-24) * 2.0**127
_FP32_UNDERFLOW = 2.0**-150

_VECTOR_BYTES = 16


def split_scale(name: str, scale: float | torch.Tensor | None) -> tuple[float, torch.Tensor | None]:
    """``(number, tensor)`` of a scale as the operator takes it; the number is 1 beside a tensor. Raises TypeError:
    neither a real number (Python's or NumPy's) nor a tensor, or a tensor with a sparse layout; ValueError: not finite
    and greater than 0, or not so in FP32."""
    if scale is None:
        return 1.0, None
    if isinstance(scale, torch.Tensor):
        if scale.is_nested:
            raise TypeError(f"{name} is a nested tensor: must be a number, an FP32 tensor of one shape, or None")
        if scale.layout is not torch.strided:
            raise TypeError(f"{name} has layout {scale.layout}: must be {torch.strided}")
        return 1.0, scale
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"{name} is {type(scale).__name__}: must be a number, an FP32 tensor, or None")
    try:
        number = float(scale)
    except OverflowError:  # an integer beyond FP64, whose digits would fill a screen
        raise ValueError(f"{name} is beyond FP64: must be finite and greater than 0 in FP32") from None
    if not 0.0 < number < float("inf"):  # false for NaN too
        raise ValueError(f"{name} = {scale}: must be finite and greater than 0")
    if not _FP32_UNDERFLOW < number < _FP32_OVERFLOW:
        rounded = "0" if number < 1.0 else "inf"
        raise ValueError(f"{name} = {scale} is {rounded} in FP32: must be finite and greater than 0 in FP32")
    return number, None


def is_vector(scale: object) -> bool:
    """Whether a multiplier has a number for every row or feature: a tensor of more than one element."""
    return isinstance(scale, torch.Tensor) and scale.numel() != 1


def scale_problems(
    name: str, scale: float | torch.Tensor | None, vectors: dict[str, tuple[int, ...]]
) -> Iterator[Exception]:
    """Errors in a multiplier that its metadata tells; ``vectors``: legal shapes of several elements, by their names."""
    if not isinstance(scale, torch.Tensor):
        return
    if scale.dtype != torch.float32:
        yield TypeError(f"{name} has dtype {scale.dtype}: must be {torch.float32}")
    if is_vector(scale) and tuple(scale.shape) not in vectors.values():
        allowed = ["a tensor of one element", *(f"{words} = {list(shape)}" for words, shape in vectors.items())]
        yield ValueError(f"{name} has shape {list(scale.shape)}: must be {' or '.join(allowed)}")


def only_number(scale: float | torch.Tensor | None) -> float | torch.Tensor | None:
    """A multiplier that is one number, and None, which is 1, in place of any other."""
    return None if is_vector(scale) else scale


def in_kernel_order(scale: float | torch.Tensor | None) -> torch.Tensor | None:
    """``[elements]``, as a kernel reads the numbers of rows or features in memory; None of a multiplier that is one.

    The tensor's own memory where that is contiguous and begins on the 16 bytes of a vector load.
    """
    if not is_vector(scale):
        return None
    flat = scale.resolve_neg().reshape(-1).contiguous()
    return flat if flat.data_ptr() % _VECTOR_BYTES == 0 else flat.clone()


def combine_scales(scale_a: float | torch.Tensor | None, scale_b: float | torch.Tensor | None) -> float | torch.Tensor:
    """``fp32(scale_a) * fp32(scale_b)`` in FP32: on the device if either is a tensor, so that nothing synchronises.
    Raises TypeError, ValueError: as `split_scale`; ValueError if the product of two numbers leaves FP32's range."""
    if not isinstance(scale_a, torch.Tensor) and not isinstance(scale_b, torch.Tensor):
        return combine_numbers(scale_a, scale_b)
    number_a, tensor_a = split_scale("scale_a", scale_a)
    number_b, tensor_b = split_scale("scale_b", scale_b)
    # One needs no multiplication, and so no kernel.
    if tensor_b is None and number_b == 1.0:
        return tensor_a.resolve_neg()  # the kernel reads memory, where a lazy negation has not happened
    if tensor_a is None and number_a == 1.0:
        return tensor_b.resolve_neg()
    # A Python number does not promote an FP32 tensor: torch rounds it to FP32 before it multiplies.
    a = number_a if tensor_a is None else tensor_a.reshape(1)
    b = number_b if tensor_b is None else tensor_b.reshape(1)
    return a * b


@functools.lru_cache(maxsize=1024, typed=True)  # True is 1.0 to an untyped cache, and is refused
def combine_numbers(scale_a: float | None, scale_b: float | None) -> float:
    """Combines two numbers like `combine_scales`."""
    number_a, _ = split_scale("scale_a", scale_a)
    number_b, _ = split_scale("scale_b", scale_b)
    scale = fp32(fp32(number_a) * fp32(number_b))  # FP64 holds the product of two FP32 numbers exactly
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"scale_a * scale_b = {number_a} * {number_b} is {scale} in FP32: must be finite and > 0")
    return scale


def output_number(scale: float | None) -> float:
    """``fp32(scale)`` of an output that a kernel divides by it. Raises TypeError, ValueError: as `split_scale`;
    ValueError if its reciprocal is not finite in FP32."""
    number = fp32(split_scale("out_scale", scale)[0])
    # FP64 has more than twice FP32's bits: its quotient of two FP32 numbers, rounded again, is rounded correctly.
    if fp32(1.0 / number) == float("inf"):
        raise ValueError(f"out_scale = {scale}: must be 1 / out_scale is finite in FP32")
    return number


def output_scale(scale: float | torch.Tensor | None) -> float | torch.Tensor:
    """Scale of an output as a kernel takes it: `output_number`, or the tensor, which it reads."""
    return scale.resolve_neg() if isinstance(scale, torch.Tensor) else output_number(scale)


def fp32(number: float) -> float:
    """The nearest FP32 number, ties to even; infinity where that is nearer than the largest."""
    return ctypes.c_float(number).value
