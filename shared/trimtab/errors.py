"""The one exception a user is meant to read."""


class TrimtabError(ValueError):
    """Bad input, stated so that it can be mended: the key, its value, what is allowed.

    The command prints it as one message and exits with a non-zero code; any other exception is a defect of ours.

    Example:
        >>> issubclass(TrimtabError, ValueError)
        True
    """
