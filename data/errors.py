"""Errors that a user can mend."""


class UserError(ValueError):
    """Bad input, a missing file or a store that does not fit. The message says what, where, and the command that mends it."""
