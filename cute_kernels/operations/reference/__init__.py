"""Results that the operations must return, in plain torch: one function per rounding contract.

NVIDIA documents neither the order nor the intermediate precision of the silicon. ``arithmetic`` chooses sums that are
exact and rounded once per instruction, or those that others measured on the chips (`tensor_cores`). Everything here is
independent of the kernels, their plans and the emulator.
"""

from cute_kernels.operations.reference.images import patch_embed_conv2d, patch_embed_images, patch_rows
from cute_kernels.operations.reference.products import gemm
from cute_kernels.operations.reference.rounding import fma32, round_tf32
from cute_kernels.operations.reference.rows import accumulate, layer_norm_scale, patch_embed_bf16x2, patch_embed_f32

__all__ = [
    "accumulate",
    "fma32",
    "gemm",
    "layer_norm_scale",
    "patch_embed_bf16x2",
    "patch_embed_conv2d",
    "patch_embed_f32",
    "patch_embed_images",
    "patch_rows",
    "round_tf32",
]
