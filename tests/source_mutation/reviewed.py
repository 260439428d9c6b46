"""Why survivors survive: file, line before, line after -> why nobody can tell the difference."""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str], str] = {}
