from tests.models.conftest import smollm2

__all__ = ["smollm2"]
