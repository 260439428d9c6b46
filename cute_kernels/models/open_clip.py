"""open_clip's models with this package's patch embedding.

    from cute_kernels.models import open_clip
    model = open_clip.convert(open_clip_model)

Vision towers of open_clip's own (``VisionTransformer.conv1``) and of timm, which its SigLIP and SigLIP2 configurations
use. Class tokens and positions stay the tower's; parameters keep their names, and checkpoints do not change.
"""

from cute_kernels.models import processors, timm
from cute_kernels.models.replace import Family, Library

_TOWER = Family("open_clip.transformer", "VisionTransformer", layer="conv1", entry="_embeds")
_FAMILIES = {"open_clip": _TOWER, **timm.FAMILIES}
_MODELS = Library(
    "open_clip", "open_clip_torch", _FAMILIES, "vision transformer of open_clip", processors.of_open_clip
)
convert, revert, is_converted = _MODELS.convert, _MODELS.revert, _MODELS.is_converted
