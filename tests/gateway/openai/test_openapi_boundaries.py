"""Requests with the boundary values of every field of the OpenAPI document, and of the wrong type, for every operation.

Schemathesis makes them when tests are collected, so that conftest.py leaves this module out of `make test`.
"""

import pytest
import schemathesis

from tests.gateway.openai.test_openapi import SETTINGS, check, schema


@pytest.mark.slow
@schema.parametrize()
@SETTINGS
def test_boundary_values(case: schemathesis.Case) -> None:
    check(case)
