"""What the tests of passes share."""

from __future__ import annotations

import pytest

from fake_world import fake_world


@pytest.fixture
def world():
    """This process is rank 0 of 4; a file may have a `world` of its own."""
    with fake_world(0, 4):
        yield
