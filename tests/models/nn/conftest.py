"""Settings of the tests that load models."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
from transformers.utils import import_utils

from tests.operations.conftest import emulated_operations_add_exactly  # noqa: F401  a fixture of these tests, too


def _directory(module: import_utils._LazyModule) -> list[str]:
    return list(dict.fromkeys([*super(import_utils._LazyModule, module).__dir__(), *module.__all__]))


@pytest.fixture(autouse=True, scope="session")
def names_of_transformers_are_listed_quickly() -> Iterator[None]:
    """The library lists all its names, in a time that grows with their square, for every model that it loads."""
    with mock.patch.object(import_utils._LazyModule, "__dir__", _directory):
        yield
