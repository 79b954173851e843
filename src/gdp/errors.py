"""The one exception that means "the input is wrong", as opposed to "gdp is wrong"."""


class InputError(ValueError):
    """Bad input: one line that says what is wrong, where, and the remedy.

    The command line prints it and exits with status 2; any other exception is a defect of gdp.
    """


class UnevenBatchError(InputError):
    """A batch that cannot be split into so many equal micro-batches."""
