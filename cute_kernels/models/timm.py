"""timm's vision transformers with this package's patch embedding.

    from cute_kernels.models import timm
    model = timm.convert(timm_model)

The layer ``proj`` of timm's ``PatchEmbed`` and ``NaFlexEmbeds`` is run by the kernels; positions and class tokens stay
timm's, an addition of their own. Parameters keep their names, and checkpoints do not change.
"""

from cute_kernels.models import processors
from cute_kernels.models.replace import Family, Library

FAMILIES = {
    "patch_embed": Family("timm.layers.patch_embed", "PatchEmbed", layer="proj"),
    "naflex": Family("timm.models.naflexvit", "NaFlexEmbeds", layer="proj", order="hwc"),
}
_MODELS = Library("timm", "timm", FAMILIES, "PatchEmbed or NaFlexEmbeds of timm", processors.of_pretrained_cfg)
convert, revert, is_converted = _MODELS.convert, _MODELS.revert, _MODELS.is_converted
