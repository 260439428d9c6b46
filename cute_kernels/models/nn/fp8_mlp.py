"""An MLP of two linear layers in E4M3, by two calls of `cute_kernels.gemm`: the first writes what the second reads."""

import functools
from collections.abc import Callable, Iterable

import torch
from torch.nn import functional

from cute_kernels.config import Activation
from cute_kernels.models.nn import calls
from cute_kernels.models.nn.engine import E4M3_MAX, Fp8Weight
from cute_kernels.operations import gemm as gemm_operation
from cute_kernels.operations.arguments import Backend

_ATTRIBUTES = ("activation_fn", "act")
"""Names under which transformers and timm keep the activation of an MLP."""
_EXACT: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
}
_NEAR = 1e-4
"""Largest difference of equal activations; the two that are nearest to each other, of GELU, are 5e-4 apart."""
_STEP = 16
"""Multiples that K and N of products in E4M3 are."""
_APART = 2e-2
"""Norm over norm, of the result of an MLP and that of its layers and activation: rounding to BF16 stays below."""


class Fp8Mlp(torch.nn.Module):
    """``fc2(activation(fc1(x)))`` in E4M3: one multiplier for each feature of a weight, and one for each input.

    Made by `convert_mlps`, or by hand from two linear layers and the largest magnitudes of their inputs. What is larger
    than those becomes the largest number. It does not train.

    Args:
        fc1, fc2: layers, K and N multiples of 16; they are not kept.
        bounds: largest magnitude of the input of each.
        activation: as of `cute_kernels.gemm`.
        backend: likewise.

    Raises:
        ValueError: other extents; bounds that are not finite and greater than 0; NaN or infinity in a weight.
    """

    def __init__(
        self,
        fc1: torch.nn.Linear,
        fc2: torch.nn.Linear,
        bounds: tuple[float, float],
        activation: Activation = "gelu_tanh",
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.activation, self.backend = activation, backend
        for name, layer, bound in zip(("fc1", "fc2"), (fc1, fc2), bounds, strict=True):
            if layer.in_features % _STEP or layer.out_features % _STEP:
                extents = f"K = {layer.in_features} and N = {layer.out_features}"
                raise ValueError(f"{name} has {extents}: must be multiples of {_STEP}")
            if not 0 < bound < float("inf"):
                raise ValueError(f"bounds = {bounds}: must be finite and greater than 0")
            weight = Fp8Weight.of(layer.weight.detach())
            self.register_buffer(f"{name}_weight", weight.values)
            self.register_buffer(f"{name}_scale", weight.scale)
            self.register_buffer(f"{name}_input_scale", weight.scale.new_full((), bound / E4M3_MAX))
            self.register_buffer(f"{name}_bias", None if layer.bias is None else layer.bias.detach().clone())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Fp8Mlp":
        """Moves and never casts: multipliers are FP32."""
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else buffer.to(fn(buffer).device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[.., N]`` of ``[.., K]``, in the type of ``x``: bfloat16, float16 or float32.

        Raises:
            NotImplementedError: gradients are enabled and ``x`` requires one.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError("Fp8Mlp has no derivative: call it under torch.no_grad()")
        rows = x.reshape(-1, x.shape[-1]).float() / self.fc1_input_scale
        rows = rows.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)  # which saturates or not, by who compiles it
        narrow = {"out_dtype": rows.dtype, "out_scale": self.fc2_input_scale}
        hidden = self._layer("fc1", rows, activation=self.activation, **narrow)
        return self._layer("fc2", hidden, out_dtype=x.dtype).view(*x.shape[:-1], self.fc2_weight.shape[0])

    def _layer(self, name: str, rows: torch.Tensor, **others: object) -> torch.Tensor:
        parts = ("weight", "bias", "input_scale", "scale")
        weight, bias, scale_a, scale_b = (self._buffers[f"{name}_{part}"] for part in parts)
        more = {"scale_a": scale_a, "scale_b": scale_b, "backend": self.backend}
        return gemm_operation.gemm(rows, weight, bias=bias, **more, **others)


def convert_mlps(model: torch.nn.Module, batches: Iterable[object], *, backend: Backend = "auto") -> torch.nn.Module:
    """Replaces every MLP of a model, in place, by an `Fp8Mlp`; returns the model.

    An MLP is a module with `torch.nn.Linear` ``fc1`` and ``fc2`` and an activation between them, as SigLIP's and CLIP's
    of transformers and ``Mlp`` of timm are. Activations are recognised by their numbers. Every MLP has to give
    what its two layers and activation give.

    Args:
        model: in eval mode; it is called with each batch, under `torch.no_grad`.
        batches: what it will be given, some hundreds of images: a mapping is given as arguments by name.
        backend: as for `cute_kernels.gemm`.

    Raises:
        ValueError: no MLP, or one that is not called, has extents that are no multiples of 16, another activation, or
            computes something else; the model is as it was.
        TypeError: a model in training mode.
    """
    if any(module.training for module in model.modules()):
        raise TypeError("model is in training mode, which drops features: must be in eval mode")
    found = {
        name: _activation(name, module)
        for name, module in model.named_modules()
        if all(isinstance(getattr(module, layer, None), torch.nn.Linear) for layer in ("fc1", "fc2"))
    }
    bounds: dict[str, list[float]] = {}
    if not found:
        raise ValueError("model has no MLP: must have modules with torch.nn.Linear fc1 and fc2")
    handles = [model.get_submodule(name).register_forward_hook(_note(name, bounds)) for name in found]
    try:
        with torch.no_grad():
            for batch in batches:
                model(**batch) if hasattr(batch, "keys") else model(batch)
    finally:
        for handle in handles:
            handle.remove()
    made = {}
    for name, activation in found.items():
        if name not in bounds:
            raise ValueError(f"{name} was not called with any of the batches: its inputs must be known")
        module = model.get_submodule(name)
        made[name] = Fp8Mlp(module.fc1, module.fc2, tuple(bounds[name]), activation, backend)
    for name, module in made.items():
        model.set_submodule(name, module)
    return model


def _activation(name: str, module: torch.nn.Module) -> Activation:
    """The name of a module's activation, by the numbers that it gives."""
    for layer in ("fc1", "fc2"):
        if why := calls.why_called(f"{name}.{layer}", getattr(module, layer), torch.nn.Linear):
            raise ValueError(f"{why}: must be a plain torch.nn.Linear")
    function, x = _function(name, module), torch.linspace(-8, 8, 1025)
    given = function(x.to(module.fc1.weight.device)).cpu()
    for known, exact in _EXACT.items():
        if given.shape == x.shape and float((given - exact(x)).abs().max()) < _NEAR:
            return known
    raise ValueError(f"{name} has an activation {function!r}: must be one of {', '.join(_EXACT)}")


def _function(name: str, module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    for attribute in _ATTRIBUTES:
        if callable(found := getattr(module, attribute, None)):
            return found
    raise ValueError(f"{name} is {type(module).__name__}: must have its activation as {' or '.join(_ATTRIBUTES)}")


def _note(name: str, bounds: dict[str, list[float]]) -> Callable[..., None]:
    """A hook that notes the largest inputs of the layers, and refuses another result than theirs."""

    def hook(module: torch.nn.Module, inputs: tuple, out: object) -> None:
        x, *_ = inputs
        hidden = _function(name, module)(module.fc1(x))
        before = bounds.get(name, (0.0, 0.0))
        bounds[name] = [max(b, float(value.abs().max())) for b, value in zip(before, (x, hidden), strict=True)]
        alike = hidden.shape[-1] == module.fc2.in_features and isinstance(out, torch.Tensor)
        expected = module.fc2(hidden).float() if alike else None
        if expected is None or not float((out.float() - expected).norm()) <= _APART * float(expected.norm()):
            kind = type(module).__name__
            raise ValueError(f"{name} is {kind}: must compute fc2(activation(fc1(x))) and nothing else")

    return hook
