"""Which of several causes a fault has: a table of facts that tell them apart, and of the mend of each.

Rows that are taken for each other stand together, each with a fact that the other one's fault does not have. Where the
facts are not known no row holds, and the kind's own help stands.
"""

from cute_kernels.emulator.reports.access_causes import ACCESSES
from cute_kernels.emulator.reports.barrier_causes import BARRIERS
from cute_kernels.emulator.reports.evidence import Cause, Evidence
from cute_kernels.emulator.reports.protocol_causes import PROTOCOL, UNHEARD

CAUSES: tuple[Cause, ...] = (*PROTOCOL, *BARRIERS, *ACCESSES, *UNHEARD)
"""The first row of a kind that holds counts."""


def cause_of(kind: str, evidence: Evidence) -> tuple[str, str]:
    """The kind of a report, and its help where a row holds, else ""."""
    rows = ACCESSES if kind == "source-in-use" and evidence.alone else CAUSES
    for cause in rows:
        if kind in cause.kinds and (fields := cause.fields(evidence)) is not None:
            return cause.kind or kind, cause.help.format_map({**evidence.common, **fields})
    return kind, ""
