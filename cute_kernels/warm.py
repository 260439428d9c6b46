"""Warm calls: what depends only on shapes and on a model's constants is looked up, not worked out again.

The first call with some constants, shape and configuration checks, plans, compiles and builds its table. What it found
is remembered here, and the next such call allocates the output and launches. A remembered call is used only on the
stream and device where it was made, and only while its constants are the same objects with the same memory, version
counter, shape and strides. The table's rules (`cute_kernels.derived`) hold here too: constants made in inference mode
are never remembered, and nothing is taken from here while a CUDA graph is captured.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cute_kernels.config import Config
from cute_kernels.derived import DERIVED

if TYPE_CHECKING:
    from cute_kernels.launch import BoundLaunch, LaunchTensors

Constants = tuple["torch.Tensor", "torch.Tensor | None", "torch.Tensor | None"]

_FP8 = torch.float8_e4m3fn
_ALIGNMENT = 16  # bytes, of a TMA address
_CAPACITY = 1024


@dataclass(frozen=True)
class WarmCall:
    """One remembered call.

    Attributes:
        launch: kernel with the sizes filled in.
        device: index of the device.
        weight: the aligned copy that the kernel reads, None if it reads the constant itself, which must be able to die.
        table: bias + position, or None.
        stamps: what the constants looked like.
        output_shape: of the result.
        generation: of `DERIVED` when this was remembered.
        config: kept alive, since its identity is part of the key.
        references: to the constants; their deaths forget this call.
    """

    launch: BoundLaunch
    device: int
    weight: torch.Tensor | None
    table: torch.Tensor | None
    stamps: tuple
    output_shape: tuple[int, ...]
    generation: int
    config: Config | None
    references: tuple[weakref.ref, ...]


class WarmCalls:
    """Remembered calls by constants, shape of ``x``, kind of scale, configuration and stream."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, WarmCall] = {}
        self._lock = threading.RLock()  # a death inside a locked section may forget a call

    def run(
        self, x: torch.Tensor, constants: Constants, scale: float | torch.Tensor, config: Config | None
    ) -> torch.Tensor | None:
        """Launches a remembered call and returns its output, or None if it has to be made the long way.

        Args:
            x: CUDA tensor, otherwise unchecked.
            constants: weight, bias, pos_embed; unchecked.
            scale: combined scale, a checked number or tensor.
            config: as `patch_embed` was given it.
        """
        device = x.get_device()
        stream = torch._C._cuda_getCurrentRawStream(device)
        call = self._calls.get(_key(x, constants, scale, config, stream))
        if call is None or call.device != device or call.generation != DERIVED.generation:
            return None
        if x.dtype is not _FP8 or not x.is_contiguous() or _stamps(constants) != call.stamps:
            return None
        address = x.data_ptr()
        if address % _ALIGNMENT or torch._C._cuda_getDevice() != device or torch._C._cuda_isCurrentStreamCapturing():
            return None
        out = torch.empty(call.output_shape, dtype=torch.bfloat16, device=x.device)
        call.launch(
            address,
            (constants[0] if call.weight is None else call.weight).data_ptr(),
            None if call.table is None else call.table.data_ptr(),
            out.data_ptr(),
            scale.data_ptr() if isinstance(scale, torch.Tensor) else scale,
            stream,
        )
        return out

    def remember(
        self,
        x: torch.Tensor,
        constants: Constants,
        config: Config | None,
        launch: BoundLaunch,
        tensors: LaunchTensors,
        output_shape: tuple[int, ...],
    ) -> None:
        """Remembers a call that was just made the long way on the current stream, if it may be made again."""
        present = [tensor for tensor in constants if tensor is not None]
        copied = tensors.x.data_ptr() != x.data_ptr()
        if copied or any(tensor.is_inference() for tensor in present) or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(x.device).cuda_stream
        key = _key(x, constants, tensors.scale, config, stream)

        def forget(_: weakref.ref, calls: dict = self._calls) -> None:
            calls.pop(key, None)

        copy = None if tensors.weight is constants[0] else tensors.weight
        call = WarmCall(
            launch, x.get_device(), copy, tensors.table, _stamps(constants), output_shape,
            DERIVED.generation, config, tuple(weakref.ref(tensor, forget) for tensor in present),
        )  # fmt: skip
        with self._lock:
            if len(self._calls) >= _CAPACITY:
                self._calls.clear()
            self._calls[key] = call


def _key(x, constants: Constants, scale, config: Config | None, stream: int) -> tuple:
    weight, bias, pos_embed = constants
    return id(weight), id(bias), id(pos_embed), x.shape, isinstance(scale, torch.Tensor), id(config), stream


def _stamps(constants: Constants) -> tuple:
    weight, bias, pos_embed = constants
    return (
        (weight.data_ptr(), weight._version, weight.shape, weight.stride()),
        None if bias is None else (bias.data_ptr(), bias._version, bias.shape, bias.stride()),
        None if pos_embed is None else (pos_embed.data_ptr(), pos_embed._version, pos_embed.shape, pos_embed.stride()),
    )


WARM = WarmCalls()
