"""Compares a result with a reference by a contract, and says where and by how much it differs."""

from numbers import Real

import torch

from cute_kernels.common.float_environment import default_environment
from cute_kernels.testing.data import POISON, bits_of

_SHOWN = 5


def assert_matches(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    ulps: int = 0,
    absolute: float = 0.0,
    relative: float = 0.0,
    name: str = "the result",
) -> None:
    """Raises AssertionError, with the first differences, unless every element fulfils one of the contract's parts.

    Without a tolerance values must be equal (NaN to NaN, and 0 to -0). An element that still holds the poison of
    `cute_kernels.testing.poisoned`, where another value is expected, was never written, and the message says so.

    Args:
        actual, expected: of one shape and dtype, on any device.
        ulps: most values of the dtype between the two, plus one.
        absolute, relative: ``|actual - expected| <= absolute + relative * |expected|``; of complex numbers the absolute
            values count.
        name: what is compared, for the message.

    Raises:
        AssertionError: another shape or dtype, or elements that differ by more.
        TypeError: no tensor, one without values or without strides, or a tolerance that is no number.
        ValueError: a tolerance that is negative, or ``ulps`` for integers and complex numbers.
    """
    __tracebackhide__ = True  # of pytest, and of `cute-kernels emulate`; so in what raises below
    with default_environment():
        found = _differences(actual, expected, ulps, absolute, relative, name)
    if found:
        raise AssertionError(found)


def _differences(
    actual: torch.Tensor, expected: torch.Tensor, ulps: int, absolute: float, relative: float, name: str
) -> str:
    """Message of `assert_matches`, "" if all is right."""
    __tracebackhide__ = True
    for label, tensor in (("actual", actual), ("expected", expected)):
        _check_tensor(label, tensor)
    for label, value in (("ulps", ulps), ("absolute", absolute), ("relative", relative)):
        if not isinstance(value, Real):
            raise TypeError(f"{label} = {value!r}: must be a number")
        if not value >= 0:
            raise ValueError(f"{label} = {value}: must be 0 or more")
    if ulps and not expected.dtype.is_floating_point:
        raise ValueError(f"ulps {ulps}: {expected.dtype} has none; use absolute")
    for label in ("shape", "dtype"):
        found, wanted = getattr(actual, label), getattr(expected, label)
        if found != wanted:
            return f"{name} has {label} {_plain(found)}, expected {_plain(wanted)}"
    actual, expected = (each.detach().cpu().resolve_neg().resolve_conj().contiguous() for each in (actual, expected))
    wrong = ~_close(actual, expected, ulps, absolute, relative)
    if not wrong.any():
        return ""
    count, total = int(wrong.sum()), wrong.numel()
    contract = _contract(ulps, absolute, relative)
    lines = [f"{count:,} of {total:,} elements of {name} ({count / total:.1%}) {contract}; the first:"]
    untouched = _untouched(actual) & wrong
    for place in wrong.reshape(-1).nonzero()[:_SHOWN].flatten().tolist():
        index = [int(i) for i in torch.unravel_index(torch.tensor(place, device="cpu"), wrong.shape)]
        here = tuple(index)
        if untouched[here]:
            lines.append(f"  {index}: never written, expected {expected[here].item()}")
        else:
            lines.append(f"  {index}: {_difference(actual[here], expected[here])}")
    if untouched.any():
        lines.append(f"  {int(untouched.sum()):,} elements were never written")
    return "\n".join(lines)


def _check_tensor(label: str, tensor: object) -> None:
    __tracebackhide__ = True
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{label} is a {type(tensor).__name__}: must be a torch.Tensor")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "on the meta device" if tensor.is_meta else f"{tensor.layout}"
        raise TypeError(f"{label} is {kind}: must be a strided tensor with values")


def _close(actual: torch.Tensor, expected: torch.Tensor, ulps: int, absolute: float, relative: float) -> torch.Tensor:
    if expected.dtype.is_complex:
        found, wanted = actual.to(torch.complex128), expected.to(torch.complex128)
        near = found.isfinite() & wanted.isfinite() & ((found - wanted).abs() <= absolute + relative * wanted.abs())
        parts = (torch.view_as_real(each) for each in (found, wanted))
        return near | torch.isclose(*parts, rtol=0, atol=0, equal_nan=True).all(-1)
    if not expected.dtype.is_floating_point:
        if not absolute and not relative:
            return actual == expected
        return _distance(actual, expected) <= absolute + relative * expected.double().abs()
    found, wanted = actual.double(), expected.double()
    close = (found == wanted) | (found.isnan() & wanted.isnan() & ~_untouched(actual) | _same_bits(actual, expected))
    finite = found.isfinite() & wanted.isfinite()
    if absolute or relative:
        close |= finite & ((found - wanted).abs() <= absolute + relative * wanted.abs())
    if ulps:
        close |= finite & ((_ordered(actual) - _ordered(expected)).abs() <= ulps)
    return close


def _distance(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """``|actual - expected|`` of integers, rounded once: FP64 does not tell neighbours beyond 2**53 apart."""
    if expected.dtype is torch.uint64:  # in the order of int64
        found, wanted = (each.view(torch.int64) ^ torch.iinfo(torch.int64).min for each in (actual, expected))
    else:
        found, wanted = actual.long(), expected.long()
    difference = torch.where(found > wanted, found - wanted, wanted - found)  # modulo 2**64
    return difference.double() + 2.0**64 * (difference < 0)


def _same_bits(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return bits_of(actual) == bits_of(expected)


def _untouched(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements hold the poison of their dtype; none of floats of 8 bits, whose NaNs are not told apart."""
    if tensor.dtype not in POISON or tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    return bits_of(tensor) == POISON[tensor.dtype]


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, with neighbours one apart and both zeros at 0."""
    width = 8 * tensor.element_size()
    magnitude = bits_of(tensor).long() & ((1 << width - 1) - 1)
    return torch.where(torch.signbit(tensor.double()), -magnitude, magnitude)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> str:
    text = f"{actual.item()}, expected {expected.item()}"
    if not expected.dtype.is_floating_point:
        off = actual.item() - expected.item()
        return text if off != off else f"{text}, off by {off}"
    found, wanted = actual.double(), expected.double()
    if not (found.isfinite() and wanted.isfinite()):
        return text
    ulps = int((_ordered(actual) - _ordered(expected)).abs())
    return f"{text}, off by {(found - wanted).item():.6g} ({ulps:,} ulps)"


def _contract(ulps: int, absolute: float, relative: float) -> str:
    allowed = [f"{ulps} ulps"] if ulps else []
    allowed += [f"{absolute:g} + {relative:g} * |expected|"] if absolute or relative else []
    return f"differ by more than {' or '.join(allowed)}" if allowed else "differ from the reference"


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value
