"""Emulated operations add exactly, as `backend="reference"` does, so that the two are compared bit by bit."""

from tests.operations.conftest import emulated_operations_add_exactly  # noqa: F401  a fixture of these tests, too
