"""The ops that graphs contain: schemas and fakes (`ops`), readable definitions (`reference`), kernels, transports."""

from freescale.kernels import launch, reference, row_kernels  # noqa: F401  (registers ops and implementations)
from freescale.kernels.ops import schemas  # noqa: F401  (registers ops and implementations)
