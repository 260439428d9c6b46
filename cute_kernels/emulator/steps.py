"""Steps of a schedule: who runs next and for how long, as a run takes them and as `Options.steps` gives them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_TEXT = re.compile(r"(\d+)([watc])(-?\d+)(?::(\d+))?")

#: Steps that are no turns: something that could succeed does not.
REFUSALS = ("t", "c")


@dataclass(frozen=True)
class Step:
    """One choice of a schedule. ``str(step)`` is e.g. ``"0w1:14"``, what `Step.of` takes.

    Attributes:
        cluster: its linear index.
        kind: ``"w"``: a warp has a turn; ``"a"``: an asynchronous operation takes effect; ``"t"``: a try_wait that
            could succeed reports a timeout; ``"c"``: a clusterlaunchcontrol.try_cancel reports that no cluster is left.
        who: number of the warp in its cluster; of ``"a"`` the index of the queue among those that have operations, -1:
            the first that does not yield; of ``"c"`` which of the cluster's try_cancels, from 0 on.
        count: of ``"w"`` the basic blocks that the warp enters at most, None: it runs until it has to wait; of ``"t"``
            which of the warp's try_waits that could succeed, from 0 on; else None.
    """

    cluster: int
    kind: Literal["w", "a", "t", "c"]
    who: int
    count: int | None = None

    def __str__(self) -> str:
        count = "" if self.count is None else f":{self.count}"
        return f"{self.cluster}{self.kind}{self.who}{count}"

    @staticmethod
    def of(text: str) -> Step:
        """The step that a text is. Raises ValueError: it is none."""
        found = _TEXT.fullmatch(text)
        if found is None or (found[4] is None) != (found[2] in "ac" or (found[2] == "w" and ":" not in text)):
            forms = "CLUSTERwWARP[:BLOCKS], CLUSTERaQUEUE, CLUSTERtWARP:NUMBER or CLUSTERcNUMBER"
            raise ValueError(f"step = {text!r}: must be {forms}")
        return Step(int(found[1]), found[2], int(found[3]), None if found[4] is None else int(found[4]))
