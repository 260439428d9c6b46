"""Settings of the tests that load models, those of `tests.nn`."""

from tests.nn.conftest import (  # noqa: F401  fixtures of these tests, too
    emulated_operations_add_exactly,
    names_of_transformers_are_listed_quickly,
)
