"""Warm calls: what depends only on shapes and on a model's constants is looked up, not worked out again.

The first call with some constants, shape and configuration checks, plans, compiles and builds its table. What it found
is remembered here, and the next such call allocates the output and launches. A remembered call is used only on the
stream and device where it was made, and only while its constants are the same objects with the same memory, version
counter, shape and strides. The table's rules (`cute_kernels.runtime.constants`) hold here too: constants made in
inference mode are never remembered, and nothing is taken from here while a CUDA graph is captured.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cute_kernels.config import PatchEmbedConfig
from cute_kernels.operations.scales import combine_numbers, combine_scales
from cute_kernels.runtime.constants import DERIVED
from cute_kernels.runtime.gpu import bound_launch

if TYPE_CHECKING:
    from cute_kernels.operations.patch_embed import PreparedLaunch

Constants = tuple["torch.Tensor", "torch.Tensor | None", "torch.Tensor | None"]
ScalePair = tuple["float | torch.Tensor | None", "float | torch.Tensor | None"]

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types without an override of what operators do."""

_ALIGNMENT = 16  # bytes, of a TMA address
_CAPACITY = 1024

# Looked up once: attribute by attribute they cost a warm call half a microsecond. CPU builds lack the last three.
_FP8, _CONTIGUOUS, _empty_like = torch.float8_e4m3fn, torch.contiguous_format, torch.empty_like
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


@dataclass(frozen=True)
class WarmCall:
    """One remembered call.

    Attributes:
        launch: kernel with sizes and constants filled in.
        device: index of the device of all tensors.
        like_output: shape, type and device of the result, in memory of one element.
        derived: the table and the aligned copy of the weight, where there are any. The weight itself must be able to
            die.
        stamps: what each constant looked like, in the order of the key; None for an absent one.
        scale_by_value: whether both scales are numbers.
        generation: of `DERIVED` when this was remembered.
        config: kept alive, since its identity is part of the key.
        references: to the constants; their deaths forget this call.
    """

    launch: Callable[..., None]
    device: int
    like_output: torch.Tensor
    derived: tuple[torch.Tensor, ...]
    stamps: tuple
    scale_by_value: bool
    generation: int
    config: PatchEmbedConfig | None
    references: tuple[weakref.ref, ...]


class WarmCalls:
    """Remembered calls by constants, shape of ``x``, kinds of the scales, configuration and stream."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, WarmCall] = {}
        self._lock = threading.RLock()  # a death inside a locked section may forget a call

    def run(
        self,
        x,
        weight,
        bias,
        pos_embed,
        pos_index,
        scale_a,
        scale_b,
        config: PatchEmbedConfig | None,
        *,
        gradients: bool,
    ) -> torch.Tensor | None:
        """Launches a remembered call and returns its output, or None if it has to be made the long way.

        Takes the arguments of `patch_embed` unchecked, whatever they are; None leaves it to the long way to say what is
        wrong with them. Written out in one piece, because every call of a Python function counts here.

        Args:
            x, weight, bias, pos_embed, pos_index, scale_a, scale_b, config: as `patch_embed` was given them.
            gradients: refuse tensors that require them.

        Raises:
            TypeError, ValueError: scales that are no legal numbers.
        """
        if type(x) not in PLAIN_TENSORS or not x.is_cuda:
            return None
        device = x.get_device()
        stream = _current_stream(device)
        indexed = pos_index is not None
        key = (id(weight), id(bias), id(pos_embed), x.shape, indexed, type(scale_a), type(scale_b), id(config), stream)
        call = self._calls.get(key)
        if call is None or call.device != device or call.generation != DERIVED.generation:
            return None
        for tensor, stamp in zip((weight, bias, pos_embed), call.stamps):
            if tensor is not None:
                pointer, version, shape, stride = stamp
                if (
                    tensor.data_ptr() != pointer
                    or tensor._version != version
                    or tensor.shape != shape
                    or (not tensor.is_contiguous() if stride is None else tensor.stride() != stride)
                    or (gradients and tensor.requires_grad)
                ):
                    return None
        address = x.data_ptr()
        if (
            x.dtype is not _FP8
            or address % _ALIGNMENT
            or not x.is_contiguous()
            or (gradients and x.requires_grad)
            or (indexed and not _is_usable_index(pos_index, x, device))
            or _current_device() != device
            or _is_capturing()
        ):
            return None
        if call.scale_by_value:
            scale = combine_numbers(scale_a, scale_b)
        else:
            for tensor in (scale_a, scale_b):
                if isinstance(tensor, torch.Tensor) and not _is_usable_scale(tensor, device, gradients):
                    return None
            combined = combine_scales(scale_a, scale_b)  # lives until the launch is in the queue
            scale = combined.data_ptr()
        out = _empty_like(call.like_output, memory_format=_CONTIGUOUS)
        call.launch(address, out.data_ptr(), scale, pos_index.data_ptr() if indexed else None)
        return out

    def remember(
        self,
        x: torch.Tensor,
        constants: Constants,
        pos_index: torch.Tensor | None,
        scales: ScalePair,
        config: PatchEmbedConfig | None,
        prepared: PreparedLaunch,
    ) -> None:
        """Remembers a call that was just made the long way on the current stream, if it may be made again."""
        tensors = prepared.tensors
        present = [tensor for tensor in constants if tensor is not None]
        copied = tensors.x.data_ptr() != x.data_ptr()
        if copied or any(t.is_inference() for t in present) or torch.cuda.is_current_stream_capturing():
            return
        if not all(type(tensor) in PLAIN_TENSORS for tensor in (x, *present)):
            return
        stream = torch.cuda.current_stream(x.device).cuda_stream
        key = (*map(id, constants), x.shape, pos_index is not None, *map(type, scales), id(config), stream)

        def forget(_: weakref.ref, calls: dict = self._calls) -> None:
            calls.pop(key, None)

        copy = None if tensors.weight is constants[0] else tensors.weight
        table = None if tensors.table is None else tensors.table.data_ptr()
        call = WarmCall(
            launch=bound_launch(prepared.plan).with_constants(
                ("x", "out", "scale", "index"), weight=tensors.weight.data_ptr(), table=table, stream=stream
            ),
            device=x.get_device(),
            like_output=tensors.out.new_empty(1).expand(prepared.output_shape),
            derived=tuple(tensor for tensor in (copy, tensors.table) if tensor is not None),
            stamps=tuple(None if t is None else _stamp(t) for t in constants),
            scale_by_value=not isinstance(tensors.scale, torch.Tensor),
            generation=DERIVED.generation,
            config=config,
            references=tuple(weakref.ref(tensor, forget) for tensor in present),
        )
        with self._lock:
            if len(self._calls) >= _CAPACITY:
                self._calls.clear()
            self._calls[key] = call


def _stamp(tensor: torch.Tensor) -> tuple:
    """What a constant looked like; no strides for a contiguous one, since asking for them takes longest."""
    return tensor.data_ptr(), tensor._version, tensor.shape, None if tensor.is_contiguous() else tensor.stride()


def _is_usable_index(index: torch.Tensor, x: torch.Tensor, device: int) -> bool:
    return (
        type(index) in PLAIN_TENSORS
        and index.dtype is torch.int32
        and index.shape == x.shape[:-1]
        and index.get_device() == device
        and index.is_contiguous()
    )


def _is_usable_scale(scale: torch.Tensor, device: int, gradients: bool) -> bool:
    return (
        scale.dtype is torch.float32
        and scale.numel() == 1
        and scale.get_device() == device
        and type(scale) in PLAIN_TENSORS
        and not (gradients and scale.requires_grad)
    )


WARM = WarmCalls()
