"""Small pieces of text that reports share."""

from collections.abc import Sequence

from cute_kernels.emulator.facts import WarpName, ranges


def short_names(warps: Sequence[WarpName]) -> str:
    """E.g. "warps 0-3" or "warp 4 'load'"."""
    roles = {warp.role for warp in warps}
    role = f" '{warps[0].role}'" if len(roles) == 1 and warps[0].role else ""
    return f"warp{'s' if len(warps) > 1 else ''} {ranges(warp.index for warp in warps)}{role}"


def names_of_warps(warps: Sequence[WarpName], lanes: Sequence[int] = ()) -> str:
    """E.g. "CTA 0, warp 1 'store', lanes 0-31"; the CTA of the first, "" without any."""
    if not warps:
        return ""
    first = warps[0]
    cluster = f"cluster {first.cluster}, " if first.several else ""
    text = f"{cluster}CTA {first.cta}, {short_names(warps)}"
    if lanes and len(warps) == 1:
        text += f", lane{'s' if len(lanes) > 1 else ''} {ranges(lanes)}"
    return text
