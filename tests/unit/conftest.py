"""The fixture where one file of tests/gpu/ still looks for it."""

from tests.conftest import seed

__all__ = ["seed"]
