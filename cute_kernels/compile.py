"""Plan -> compiled kernel. The only module that calls `cute.compile`."""

from __future__ import annotations
