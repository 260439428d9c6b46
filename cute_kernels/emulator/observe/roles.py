"""Names of warp roles of any kernel: those that a user gives, else what the warps have been seen to do."""

from collections.abc import Iterable, Mapping, Sequence

from cute_kernels.emulator.facts import ranges

_MOST_WARPS = 32  # of a CTA


def activity(opcodes: Iterable[str]) -> str:
    """Purpose of a warp, by the asynchronous work that it starts, e.g. ``"MMA"`` or ``"epilogue, TMA store"``.
    ``opcodes``: of the instructions that it executed, guarded ones included. Returns the names that apply of ``TMA
    load``, ``cp.async``, ``MMA``, ``epilogue`` (it reads accumulators from tensor memory), ``TMA store``; of a warp
    without any, ``global store``, else ``compute`` if it accesses shared memory, else ""."""
    found = {name for opcode in opcodes if (name := _activity(opcode.split(".")))}
    names = [name for name in ("TMA load", "cp.async", "MMA", "epilogue", "TMA store") if name in found]
    return ", ".join(names) or next((name for name in ("global store", "compute") if name in found), "")


def _activity(parts: Sequence[str]) -> str:
    name = parts[0]
    if name == "cp":
        if "bulk" in parts:
            spaces = [part.split("::")[0] for part in parts if part.split("::")[0] in ("shared", "global")]
            # Destination, source: a prefetch names one space, groups none.
            return {("shared", "global"): "TMA load", ("global", "shared"): "TMA store"}.get(tuple(spaces), "")
        return "cp.async" if "shared" in [part.split("::")[0] for part in parts] else ""
    if name in ("tcgen05", "wgmma"):
        return {"mma": "MMA", "mma_async": "MMA", "ld": "epilogue"}.get(parts[1], "")
    if name in ("mma", "wmma"):
        return "MMA"
    if name in ("st", "red") and "global" in parts:
        return "global store"
    return "compute" if name in ("ld", "st") and parts[1].split("::")[0] == "shared" else ""


def parse(text: str) -> tuple[str, tuple[str, ...]]:
    """``[KERNEL:]ROLE=WARPS,ROLE=WARPS,...``, WARPS being 4 or 0-3, as (part of a kernel's name, name per warp). Raises
    ValueError: anything else; a warp with two roles."""
    kernel, colon, rest = text.rpartition(":")
    names: dict[int, str] = {}
    for item in rest.split(","):
        role, equals, warps = item.partition("=")
        first, dash, last = warps.partition("-")
        if not (role.strip() and equals and first.isdecimal() and (last.isdecimal() if dash else True)):
            raise ValueError(f"{text!r}: {item!r} is not ROLE=WARP or ROLE=FIRST-LAST")
        numbers = range(int(first), int(last if dash else first) + 1)
        if not numbers or numbers[-1] >= _MOST_WARPS:
            raise ValueError(f"{text!r}: warps {warps}; a CTA has warps 0 to {_MOST_WARPS - 1} at most")
        for number in numbers:
            if number in names:
                raise ValueError(f"{text!r}: warp {number} has two roles, {names[number]} and {role.strip()}")
            names[number] = role.strip()
    if colon and not kernel:
        raise ValueError(f"{text!r}: the name of the kernel before ':' is empty")
    return kernel, tuple(names.get(number, "") for number in range(max(names) + 1))


def text_of(kernel: str, names: Sequence[str]) -> str:
    """The text from which `parse` makes the same kernel and names per warp."""
    named = ",".join(f"{name}={warp}" for warp, name in enumerate(names) if name)
    return f"{kernel}:{named}" if kernel else named


def of_kernel(kernel: str, roles: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Names per warp of a kernel: those of the longest key that its name contains, () if there is none."""
    keys = sorted((key for key in roles if key in kernel), key=len)
    return tuple(roles[keys[-1]]) if keys else ()


def grouped(activities: Mapping[str, str]) -> dict[str, list[str]]:
    """Tracks of counts that stand for one row, by its title: warps without a name that do the same, else one track.
    ``activities``: by track (the name of a role, or "warp 3"), of `activity`."""
    groups: dict[str, list[str]] = {}
    unnamed: dict[str, list[int]] = {}
    for track, does in activities.items():
        number = track.removeprefix("warp ")
        if track.startswith("warp ") and number.isdecimal():
            unnamed.setdefault(does, []).append(int(number))
        else:
            groups[track] = [track]
    for does, numbers in sorted(unnamed.items(), key=lambda item: min(item[1])):
        title = f"warp{'s' if len(numbers) > 1 else ''} {ranges(numbers)}" + (f" ({does})" if does else "")
        groups[title] = [f"warp {number}" for number in sorted(numbers)]
    return groups
