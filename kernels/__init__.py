"""The ops that graphs contain: schemas and fakes (`ops`), readable definitions (`reference`), kernels, transports."""

from freescale.kernels import (  # noqa: F401  (registers ops and implementations)
    launch,
    reference,
    row_kernels,
)
from freescale.kernels.ops import schemas  # noqa: F401  (registers ops and implementations)
