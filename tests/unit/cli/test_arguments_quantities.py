"""Times and numbers as people write them."""

import pytest

from evenstride.cli import arguments
from evenstride.errors import ConfigError
from tests.messages import raises_message


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("6h", 21600), ("2d", 172800), ("1.5", 5400), ("5min", 300)],
)
def test_times(text: str, seconds: float) -> None:
    assert arguments.seconds(text, "--deadline") == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "0s", "6 weeks", "1h30m"])
def test_an_invalid_time_is_refused(text: str) -> None:
    with raises_message(ConfigError):
        arguments.seconds(text, "--deadline")


def test_numbers_are_put_in_order() -> None:
    assert arguments.wholes("512,64,64", "--batches") == (64, 512)
    assert arguments.parts("1,1/4,0.5", "--parts") == (0.25, 0.5, 1.0)
    assert arguments.names("a, b,,c") == ("a", "b", "c")


@pytest.mark.parametrize("text", ["2", "1/0", "0", "a", "-1/2", ""])
def test_an_invalid_fraction_is_refused(text: str) -> None:
    with raises_message(ConfigError):
        arguments.parts(text, "--parts")
