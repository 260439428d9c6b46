"""Shapes of the SigLIP models by name; free of torch, so that the command line knows them before anything is loaded."""

from __future__ import annotations

#: Model name -> (hidden size, patch size).
ARCHITECTURES = {
    "base-p16": (768, 16),
    "large-p16": (1024, 16),
    "so400m-p14": (1152, 14),
    "so400m-p16": (1152, 16),
    "giant-opt-p16": (1536, 16),
}
