"""The ops that graphs contain: schema and fake (`ops`), readable reference (`reference`), plans (`plan`)."""

from freescale.kernels import ops, reference, rows, transports  # noqa: F401  (registers the ops and their implementations)
