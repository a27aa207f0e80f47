"""What freescale logs in a rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


def listen(
    to: str = "freescale", level: int = logging.WARNING, as_: Callable[[logging.LogRecord], Any] = logging.LogRecord.getMessage
) -> list[Any]:
    """A list to which each record from now on is added."""
    heard: list[Any] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: heard.append(as_(record))  # type: ignore[method-assign]
    logging.getLogger(to).addHandler(handler)
    return heard


def with_level(record: logging.LogRecord) -> tuple[str, str]:
    return record.levelname, record.getMessage()
