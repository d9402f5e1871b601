"""The error that blames the box."""


class BoxError(RuntimeError):
    """The user's function failed, or answered with something that is not one row of output per row of input.

    What the function itself raised, if anything, is chained as ``__cause__``.
    """
