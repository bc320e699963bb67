"""Bad input is refused: a UserError of one line, as a command prints it."""

import pytest

from qerl_jax.errors import UserError


def refused(words, function, *arguments, **options):
    """Asserts that a call is refused in one line, in which a pattern occurs; returns the line."""
    with pytest.raises(UserError, match=words) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
