"""The torch releases that freescale supports."""

from __future__ import annotations

import torch

SUPPORTED = ("2.11", "2.12", "2.13", "2.14", "2.15")


def torch_version() -> str:
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])


def require_supported() -> None:
    if torch_version() not in SUPPORTED:
        raise RuntimeError(f"freescale supports torch {', '.join(SUPPORTED)}; found {torch.__version__}")
