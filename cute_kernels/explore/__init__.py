"""Comparing configurations of kernels: tables, notebooks, figures, tuning on a GPU.

This is the room that knows both halves: it plans and runs kernels, and has the emulator count what they do.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "show_layout":
        import cute_kernels.explore.layout_view as layout_view  # needs NumPy, an extra

        return layout_view.show_layout
    if name == "tune":
        import cute_kernels.explore.tuning.own as own  # needs torch and the emulator

        return own.tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
