"""The kernel of docs/examples/bias_add.py with one fault planted, as a program of its own."""

from __future__ import annotations

from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "bias_add.py"

FAULTS = {
    "no proxy fence": ('cute.arch.fence_proxy("async.shared", space="cta")', "pass"),
    "no wait for an empty stage": ("cute.arch.mbarrier_wait(empty + stage, (i // STAGES & 1) ^ 1)", "pass"),
    "half of the bytes": ("ROWS * COLUMNS * 4)", "ROWS * COLUMNS * 2)"),
    "no arrival": ("cute.arch.mbarrier_arrive(empty + stage)", "pass"),
    "out of bounds": ("bias[column]", "bias[column + 1000]"),
    "first parity": (") ^ 1)", "))"),
    "too few arrivals": ("empty + stage, ADDERS)", "empty + stage, ADDERS // 2)"),
    "store not waited for": ("cute.arch.cp_async_bulk_wait_group(0, read=True)", "pass"),
    "one try to wait": ("mbarrier_wait(full", "mbarrier_try_wait(full"),
    "no wait for the launch before": ("cute.arch.griddepcontrol_wait()", "pass"),
    "subtracted": ("+ bias[column]", "- bias[column]"),
}
"""Name -> what stands in the program, and what takes its place."""


def planted(fault: str | None, folder: Path) -> Path:
    """The program with a fault, a key of `FAULTS`, or with none."""
    source = EXAMPLE.read_text()
    if fault is not None:
        old, new = FAULTS[fault]
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = folder / "program.py"
    path.write_text(source)
    return path
