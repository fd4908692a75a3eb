"""Errors a user can cause. Each says what was given, what is needed, and the way out."""

from __future__ import annotations


class NVFP4Error(ValueError):
    """Base of everything this package raises for a caller's mistake."""


class ShapeError(NVFP4Error):
    """A shape, dtype, device or constant that an operator cannot take."""


class GradError(NVFP4Error):
    """An operator was asked for a gradient; they are inference only."""


class CaptureError(NVFP4Error):
    """A kernel would have to be compiled inside a CUDA graph capture."""

    @classmethod
    def first_call(cls, name: str) -> CaptureError:
        """The error for an operator, with the way out."""
        return cls(
            f"nvfp4::{name} runs for the first time with these shapes and constants, and inside a CUDA graph capture "
            "nothing can be compiled; run it once before the capture, or call nvfp4.warmup(weights, tokens=...)"
        )


class ScaleError(NVFP4Error):
    """A checkpoint whose scales must not be served; ``report`` holds the findings."""

    def __init__(self, report):
        super().__init__(str(report))
        self.report = report
