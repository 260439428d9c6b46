"""The engine of embeddings that begin with a LayerNorm of the pixels (`cute_kernels.layer_norm_linear`)."""

import torch

from cute_kernels.config import longest_row
from cute_kernels.models.nn import availability, traced
from cute_kernels.models.nn.engine import PatchEngine
from cute_kernels.models.nn.options import PatchOptions
from cute_kernels.operations.base import ROW_BYTES
from cute_kernels.operations.layer_norm import eps_of_pixels, layer_norm_linear, prepare_layer_norm_weight


class LayerNormEngine(PatchEngine):
    """Runs a LayerNorm over uint8 rows and the linear layer behind it, whose parameters live in a module; of options of
    precision ``"int8"``. What rows are divided by is 255 times their standard deviation."""

    def _trains(self, pixels: torch.Tensor, weight: torch.Tensor) -> bool:
        """Bias and norm are folded into a prepared weight, through which no gradients flow."""
        return False

    @property
    def divisor(self) -> float:
        """The divisor of rows of 0 to 255."""
        return 255 * self.options.std[0]

    def why_no_kernel(self, weight: torch.Tensor, eps: float) -> str | None:
        """Why rows of this length, or a LayerNorm's ``eps``, are left to the plain module; None where they are not."""
        k, most = weight.shape[1], longest_row("uint8")
        if k % ROW_BYTES or k > most:
            return f"a LayerNorm is over {k} pixels, of which kernels take multiples of {ROW_BYTES} up to {most}"
        if eps_of_pixels(eps, self.divisor, k) is None:
            return f"the LayerNorm has eps = {eps}, which beside sums over {k} pixels is no normal number in FP32"
        return None

    def normed(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """``[.., N]`` in the type of ``weight``, of ``[.., K]`` uint8 ``rows`` that the LayerNorm normalises and the
        linear layer multiplies."""
        if availability.traced():
            return torch.ops.cute_kernels.embed_normed(rows, weight, bias, norm_weight, norm_bias, eps, self.texts[0])
        return self.run_normed(rows, (weight, bias, norm_weight, norm_bias), eps)

    def run_normed(self, rows: torch.Tensor, parameters: tuple[torch.Tensor | None, ...], eps: float) -> torch.Tensor:
        """`normed`, of tensors as they are in a graph, too."""
        options = self.options
        prepared = self.made_from(
            parameters,
            f"layer norm, eps = {eps}",
            lambda: prepare_layer_norm_weight(*parameters, eps=eps, divisor=self.divisor),
        )
        return layer_norm_linear(rows, prepared, out_dtype=parameters[0].dtype, backend=options.backend)

    def _no_integer_kernel(self, pixels: torch.Tensor, weight: torch.Tensor) -> None:
        """None: those of `cute_kernels.gemm` take rows."""


traced.define_normed(lambda text: LayerNormEngine(PatchOptions.of_text(text)))
