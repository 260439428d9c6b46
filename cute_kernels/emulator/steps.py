"""Steps of a schedule: who runs next and for how long, as a run takes them and as `Options.steps` gives them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_TEXT = re.compile(r"(\d+)([watch])(-?\d+)(?::(\d+))?(?:-(\d+)w(\d+):(\d+))?")

#: Steps that come one after the other; the others hold whenever it is their turn.
TURNS = ("w", "a")


@dataclass(frozen=True)
class Step:
    """One choice of a schedule. ``str(step)`` is e.g. ``"0w1:14"``, what `Step.of` takes."""

    cluster: int  # its linear index
    # ``"w"``: a warp has a turn; ``"a"``: an asynchronous operation takes effect; ``"t"``: a try_wait that could
    # succeed reports a timeout; ``"c"``: a clusterlaunchcontrol.try_cancel reports that no cluster is left; ``"h"``: a
    # warp is held
    kind: Literal["w", "a", "t", "c", "h"]
    # number of the warp in its cluster; of ``"a"`` the index of the queue among those that have operations, -1: the
    # first that does not yield; of ``"c"`` which of the cluster's try_cancels, from 0 on
    who: int
    # of ``"w"`` the basic blocks that the warp enters at most, None: it runs until it has to wait; of ``"t"`` which of
    # the warp's try_waits that could succeed, from 0 on; of ``"h"`` the instructions that it executes at most, whole
    # blocks of them; else None
    count: int | None = None
    # of ``"h"`` another warp, by its cluster and its number, and how many instructions that one executes before the
    # warp goes on, if it can; else ()
    until: tuple[int, ...] = ()

    def __str__(self) -> str:
        count = "" if self.count is None else f":{self.count}"
        until = "-{}w{}:{}".format(*self.until) if self.until else ""
        return f"{self.cluster}{self.kind}{self.who}{count}{until}"

    @staticmethod
    def of(text: str) -> Step:
        """The step that a text is. Raises ValueError: it is none."""
        found = _TEXT.fullmatch(text)
        counted = found is not None and found[4] is not None
        if found is None or counted != (found[2] in "th" or (found[2] == "w" and ":" in text)) or (
            (found[2] == "h") != (found[5] is not None)
        ):
            forms = "CLUSTERwWARP[:BLOCKS], CLUSTERaQUEUE, CLUSTERtWARP:NUMBER, CLUSTERcNUMBER"
            forms += " or CLUSTERhWARP:INSTRUCTIONS-CLUSTERwWARP:INSTRUCTIONS"
            raise ValueError(f"step = {text!r}: must be {forms}")
        until = tuple(map(int, found.groups()[4:])) if found[5] is not None else ()
        return Step(int(found[1]), found[2], int(found[3]), int(found[4]) if counted else None, until)
