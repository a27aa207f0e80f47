"""What every test begins with: the same random numbers every time, so that a failure can be seen again.

`FRESH=1` takes new ones: other seeds, other examples of hypothesis (the seed is printed with a failure).
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from seeding import FRESH, seed

settings.register_profile("same", derandomize=True)
settings.register_profile("fresh", print_blob=True)
settings.load_profile("fresh" if FRESH else "same")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    print("seed", seed())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Those of Triton's interpreter are slow and need one core: they begin now."""
    import interpreted

    found = (getattr(item.obj, "in_the_interpreter", None) for item in session.items if isinstance(item, pytest.Function))
    if interpreted.HAS_TRITON and not session.config.option.collectonly:
        for file in dict.fromkeys(filter(None, found)):
            interpreted.start(file)
