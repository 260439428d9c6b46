"""Small pieces of text that all rooms share."""

from collections.abc import Sequence


def counted(number: int, noun: str, several: str = "") -> str:
    """E.g. ``1 mutant`` and ``1,024 mutants``; ``several``: what more than one is called, where it has no s."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each row, whose cells stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
