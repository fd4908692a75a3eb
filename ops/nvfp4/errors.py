"""Errors a user can cause. Each says what was given, what is needed, and the way out."""


class NVFP4Error(ValueError):
    """Base of everything this package raises for a caller's mistake."""


class ShapeError(NVFP4Error):
    """A shape, dtype, device or constant that an operator cannot take."""


class GradError(NVFP4Error):
    """An operator was asked for a gradient; they are inference only."""


class ScaleError(NVFP4Error):
    """A checkpoint whose scales must not be served; ``report`` holds the findings."""

    def __init__(self, report):
        super().__init__(str(report))
        self.report = report
