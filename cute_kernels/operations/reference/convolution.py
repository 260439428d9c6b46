"""The models' convolution before any quantisation."""

import torch

from cute_kernels.common.float_environment import default_environment


@default_environment()
def patch_embed_conv2d(
    pixels: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
) -> torch.Tensor:
    """The model's patch embedding before any quantisation: FP32 ``conv2d`` of the image, plus position embedding.

    Args:
        pixels: ``[B, C, H, W]`` preprocessed image.
        weight: ``[N, C, p, p]`` convolution weight, applied with stride p and no padding.
        bias: ``[N]`` or None.
        pos_embed: ``[(H // p) * (W // p), N]`` or None.

    Returns:
        ``[B, S, N]`` float32 with the positions in row-major order of the patch grid.
    """
    bias = None if bias is None else bias.to(torch.float32)
    maps = torch.nn.functional.conv2d(pixels.to(torch.float32), weight.to(torch.float32), bias, stride=weight.shape[-1])
    tokens = maps.flatten(2).transpose(1, 2).contiguous()
    return tokens if pos_embed is None else tokens + pos_embed.to(torch.float32)
