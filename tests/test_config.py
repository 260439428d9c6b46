"""Fields of problems and configurations: of which types they are, and what becomes of integers of other libraries."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig, Sm100PatchEmbedConfig


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        (Sm100PatchEmbedConfig, "stages", 4.0, "stages = 4.0 is float: must be an integer"),
        (Sm100PatchEmbedConfig, "stages", "4", "stages = '4' is str: must be an integer"),
        (Sm100PatchEmbedConfig, "stages", True, "stages = True is bool: must be an integer"),
        (Sm100PatchEmbedConfig, "stages", np.float32(4), "is float32: must be an integer"),
        (Sm100PatchEmbedConfig, "tile_n", None, "tile_n = None is NoneType"),
        (Sm100PatchEmbedConfig, "epilogue", 3, "epilogue = 3 is int: must be a string"),
        (Sm100PatchEmbedConfig, "epilogue", None, "epilogue = None is NoneType"),
        (Sm90PatchEmbedConfig, "pingpong", "yes", "pingpong = 'yes' is str: must be True or False"),
        (Sm90PatchEmbedConfig, "pingpong", np.True_, "is numpy.bool"),
        (Sm90PatchEmbedConfig, "order", b"flat", "order = b'flat' is bytes: must be a string"),
        (PatchEmbedProblem, "m", 4.0, "m = 4.0 is float: must be an integer"),
        (PatchEmbedProblem, "n", "8", "n = '8' is str: must be an integer"),
        (PatchEmbedProblem, "k", True, "k = True is bool: must be an integer"),
        (PatchEmbedProblem, "table_rows", None, "table_rows = None is NoneType"),
        (PatchEmbedProblem, "in_dtype", 8, "in_dtype = 8 is int: must be a string"),
    ],
)
def test_fields_of_another_type_are_refused_by_name(kind, field, value, message) -> None:
    sizes = {"m": 16, "n": 16, "k": 16} if kind is PatchEmbedProblem else {}
    with pytest.raises(TypeError, match=f"{re.escape(message)}"):
        kind(**sizes | {field: value})


def test_integers_of_other_libraries_become_python_integers() -> None:
    """A `repr` of np.int64(4) would be another key of the disk cache."""
    config = Sm100PatchEmbedConfig(stages=np.int64(4), tile_n=np.uint16(256))
    assert repr(config) == repr(Sm100PatchEmbedConfig())
    assert repr(PatchEmbedProblem(np.int32(16), np.int8(8), np.int64(32))) == repr(PatchEmbedProblem(16, 8, 32))
    assert repr(Sm90PatchEmbedConfig(pingpong=0)) == repr(Sm90PatchEmbedConfig(pingpong=False))
    with pytest.raises(ValueError, match="pingpong = 2: must be True, False"):
        Sm90PatchEmbedConfig(pingpong=2)
