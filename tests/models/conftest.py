"""Settings of the tests that load models, those of `tests.models.nn`."""

from tests.models.nn.conftest import (  # noqa: F401  fixtures of these tests, too
    emulated_operations_add_exactly,
    names_of_transformers_are_listed_quickly,
)
