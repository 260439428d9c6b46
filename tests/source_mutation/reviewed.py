"""Why survivors survive: file, line before, line after -> why nobody can tell the difference."""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "cute_kernels/plan/patch_embed_images/base.py",
        'integers = p.precision == "int8"',
        'integers = p.precision >= "int8"',
    ): "no other name of a precision sorts behind int8",
}
