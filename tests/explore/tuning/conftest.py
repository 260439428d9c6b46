"""A folder of configurations found fastest for each test, as `tests.operations.runtime.test_tuned` has it."""

from tests.operations.runtime.test_tuned import root  # noqa: F401  a fixture of these tests, too
