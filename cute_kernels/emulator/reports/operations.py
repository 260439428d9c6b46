"""Names of instructions in sentences."""

from cute_kernels.emulator.isa.ptx.program import Instruction

_PLAIN = {
    "ld": "load", "ldu": "load", "ldmatrix": "ldmatrix", "st": "store", "stmatrix": "stmatrix", "atom": "atomic",
    "red": "atomic", "wgmma": "wgmma", "mbarrier": "mbarrier operation", "bar": "barrier", "barrier": "barrier",
    "tensormap": "change of a tensor map",
}  # fmt: skip
_TENSOR = {"mma": "MMA", "cp": "tcgen05.cp", "ld": "tcgen05.ld", "st": "tcgen05.st", "shift": "tcgen05.shift",
           "alloc": "tcgen05.alloc", "dealloc": "tcgen05.dealloc", "commit": "tcgen05.commit"}  # fmt: skip


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
