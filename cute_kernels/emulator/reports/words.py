"""Small pieces of text that reports share: names of warps and of instructions."""

from collections.abc import Sequence

from cute_kernels.emulator.facts import WarpName, ranges
from cute_kernels.emulator.isa.ptx.program import Instruction

_PLAIN = {
    "ld": "load", "ldu": "load", "ldmatrix": "ldmatrix", "st": "store", "stmatrix": "stmatrix", "atom": "atomic",
    "red": "atomic", "wgmma": "wgmma", "mbarrier": "mbarrier operation", "bar": "barrier", "barrier": "barrier",
    "tensormap": "change of a tensor map",
}  # fmt: skip
_TENSOR = {"mma": "MMA", "cp": "tcgen05.cp", "ld": "tcgen05.ld", "st": "tcgen05.st", "shift": "tcgen05.shift",
           "alloc": "tcgen05.alloc", "dealloc": "tcgen05.dealloc", "commit": "tcgen05.commit"}  # fmt: skip


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


def noun(instruction: Instruction) -> str:
    """E.g. "TMA load", "store", "MMA"; the opcode's first part where there is no better word."""
    parts = instruction.parts
    if parts[0] == "tcgen05":
        return _TENSOR.get(parts[1], f"tcgen05.{parts[1]}")
    if parts[0] == "cp" and "bulk" in parts:
        return _bulk(parts)
    if parts[:2] == ("cp", "async"):
        return "cp.async"
    return _PLAIN.get(parts[0], parts[0])


def _bulk(parts: tuple[str, ...]) -> str:
    spaces = [part.split("::")[0] for part in parts if part.split("::")[0] in ("shared", "global")]
    name = "TMA" if "tensor" in parts else "bulk"
    if "reduce" in parts:
        return f"{name} reduction"
    if spaces[:2] == ["shared", "shared"]:
        return "bulk copy"
    return f"{name} load" if spaces[:1] == ["shared"] else f"{name} store"


def with_article(words: str) -> str:
    """With "a" or "an", as it is spoken."""
    return f"{'an' if words[:1].lower() in 'aeiou' or words.startswith('MMA') else 'a'} {words}"
