"""The one exception for what the user can mend: scripts print its line and exit with code 2."""


class UserError(Exception):
    """Bad input. The message is one line that names the file, the row or the key, and says what to do."""
