"""Small pieces of text that all rooms share."""


def counted(number: int, noun: str, several: str = "") -> str:
    """E.g. ``1 mutant`` and ``1,024 mutants``; ``several``: what more than one is called, where it has no s."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"
