"""Groups of cp.async as the PTX ISA has them: each thread has groups of its own, of which a wait leaves the newest."""

from __future__ import annotations

Event = tuple[str, int]  # "copy" or "commit", and the mask of the lanes that execute it


def needed(events: list[Event], waiting: int, newest: int | None) -> set[int]:
    """Numbers of the copies that have to be complete before lanes go on from a wait.

    Args:
        events: what the warp did before, in order.
        waiting: mask of the lanes that wait.
        newest: of the groups of each so many may be incomplete; None: it waits for all that it has issued.
    """
    found: set[int] = set()
    for lane in range(32):
        if not waiting >> lane & 1:
            continue
        open_copies: list[int] = []
        groups: list[list[int]] = []
        copies = 0
        for what, mask in events:
            if mask >> lane & 1 and what == "copy":
                open_copies.append(copies)
            elif mask >> lane & 1:
                groups.append(open_copies)
                open_copies = []
            copies += what == "copy"
        found.update(number for group in groups[: max(0, len(groups) - (newest or 0))] for number in group)
        found.update(open_copies if newest is None else ())
    return found
