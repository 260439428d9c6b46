"""Patch embeddings as modules: what models have, run by the kernels."""

from cute_kernels.models.nn.fp8_mlp import Fp8Mlp, convert_mlps
from cute_kernels.models.nn.layers import PatchConv2d, PatchLinear, convert_layer, revert_layer
from cute_kernels.models.nn.options import PatchOptions
from cute_kernels.models.nn.traced import kernels_in_export

__all__ = [
    "Fp8Mlp",
    "PatchConv2d",
    "PatchLinear",
    "PatchOptions",
    "convert_layer",
    "convert_mlps",
    "kernels_in_export",
    "revert_layer",
]
