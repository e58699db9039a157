"""One grammar for the specifications of policies, modes, sinks and notices.

A specification is a name, alone or with an argument: ``ssp``, ``static:20,100``,
``ssp(staleness=3)``, ``adaptive:min_gain=0.01,allow_idle=1``. A name that stands for a dataclass
takes the fields of the class as settings. The metadata of a field defines its valid values
(`within`, `one_of`). Lists have commas between specifications.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from math import inf
from numbers import Integral, Real
from typing import Any

from evenstride.errors import ConfigError

_COMMA = re.compile(r",(?![^(]*\))")  # outside of parentheses
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_DURATION = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*")
_UNITS_S = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed specification."""

    text: str  # as given
    name: str  # the first part
    argument: str | None  # the part after the name; ``None`` without one, not even a colon

    @property
    def closed(self) -> bool:
        """Whether its parentheses, if any, close at its end."""
        return _form(":").fullmatch(self.text) is not None


def parse_spec(text: str, separators: str = ":") -> Spec:
    """Return the name and the argument in a text; invalid rests belong to the argument.

    One of the ``separators`` may replace the parentheses.

    >>> parse_spec("ssp(staleness=3)").argument, parse_spec("ssp:staleness=3").argument
    ('staleness=3', 'staleness=3')
    >>> parse_spec("bsp").argument is None
    True
    """
    found = _form(separators).fullmatch(text)
    if found is None:  # unclosed parentheses
        name = _name(text, separators)
        return Spec(text, name.strip(), text[len(name) :].strip())
    return Spec(text, found[1].strip(), found[3] if found[2] is None else found[2])


def _form(separators: str) -> re.Pattern[str]:
    name = rf"[^({separators}]*"
    return re.compile(rf"\s*({name})(?:\((.*)\)\s*|[{separators}](.*))?", re.DOTALL)


def _name(text: str, separators: str = ":") -> str:
    return re.split(rf"[({separators}]", text, maxsplit=1)[0]


def split_specs(texts: str | Iterable[str], names: Collection[str]) -> tuple[str, ...]:
    """Return the specifications in comma-separated lists.

    Commas in parentheses are part of a specification. So are those after a colon, up to the
    next part that begins with one of the names or with an import path.

    >>> split_specs("bsp,ssp(staleness=2,servers=2),asp:servers=2,rate=staleness", ("bsp", "asp"))
    ('bsp', 'ssp(staleness=2,servers=2)', 'asp:servers=2,rate=staleness')
    >>> split_specs("static:20,100,uniform", ("static", "uniform"))
    ('static:20,100', 'uniform')
    """
    found = list[str]()
    for text in [texts] if isinstance(texts, str) else texts:
        first = len(found)
        for part in filter(None, map(str.strip, _COMMA.split(text))):
            if len(found) > first and _goes_on(found[-1], part, names):
                found[-1] += f",{part}"
            else:
                found.append(part)
    return tuple(found)


def _goes_on(spec: str, part: str, names: Collection[str]) -> bool:
    name = parse_spec(part).name
    return spec.startswith(f"{_name(spec)}:") and not (name in names or is_import_path(name))


def is_import_path(name: str) -> bool:
    """Return whether a name has the form of a module and a class in it, such as ``mine.Own``."""
    return _IMPORT_PATH.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Allowed:
    """The valid values of a setting."""

    kind: type[Any]  # ``int``, ``float`` or ``str``.
    least: float = 0  # of a number.
    most: float = inf  # of a number.
    above: bool = False  # whether a number must be more than ``least``.
    below: bool = False  # whether a number must be less than ``most``.
    choices: tuple[Any, ...] = ()  # all valid values; empty for a range.
    example: Any = None  # a value to show, if the default is missing or unhelpful.
    instead: str = ""  # remedy for a setting without a default.

    def __str__(self) -> str:
        if self.choices:
            *others, last = map(str, self.choices)
            return f"{', '.join(others)} or {last}"
        what = "an integer" if self.kind is int else "a finite number"
        least = f"{'above' if self.above else 'at least'} {self.least}"
        if self.most == inf:
            return f"{what}, {least}"
        if not self.above and not self.below:
            return f"{what} from {self.least} to {self.most}"
        return f"{what}, {least} and {'below' if self.below else 'at most'} {self.most}"

    def has(self, value: object) -> bool:
        # True is an int in Python, but not a valid number here.
        number = {int: Integral, float: Real}.get(self.kind, str)
        if isinstance(value, bool) or not isinstance(value, number):
            return False
        if self.choices:
            return value in self.choices
        given: Any = value
        enough = given > self.least if self.above else given >= self.least
        few = given < self.most if self.below or self.most == inf else given <= self.most
        return bool(enough and few)  # NaN and infinity are neither


def within(
    kind: type[Any],
    least: float = 0,
    most: float = inf,
    *,
    above: bool = False,
    below: bool = False,
    example: Any = None,
    instead: str = "",
) -> Mapping[str, Allowed]:
    """Return the metadata of a field that holds a number; see `Allowed`."""
    return {"allowed": Allowed(kind, least, most, above, below, (), example, instead)}


def one_of(*choices: Any) -> Mapping[str, Allowed]:
    """Return the metadata of a field that holds one of these values."""
    return {"allowed": Allowed(type(choices[0]), choices=choices)}


def check_settings(what: str, made: Any) -> None:
    """Raise `ConfigError` unless every setting of a dataclass satisfies its field's metadata.

    ``what`` is a noun and a name for the message, such as ``policy adaptive``.
    """
    # A user's subclass of a policy may have further fields, which it checks itself.
    for field in (field for field in fields(made) if "allowed" in field.metadata):
        if not _allowed(field).has(value := getattr(made, field.name)):
            raise _refused(what, field, repr(value))


def settings_in(spec: Spec, what: str, kind: type[Any], form: str) -> dict[str, Any]:
    """Return the settings in a specification's argument, by name, for a dataclass.

    ``what`` is a noun for the message, such as ``policy`` or ``sync``. ``form`` is the format of
    the example: ``{}({})`` or ``{}:{}``. `ConfigError` if a setting is unknown, missing, given
    twice, or of another type.
    """
    known, values = {field.name: field for field in fields(kind)}, dict[str, Any]()
    for part in filter(None, map(str.strip, (spec.argument or "").split(","))):
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if name not in known or not equals:
            raise ConfigError(
                f"invalid {what} {spec.text!r} at {part!r}: settings of {spec.name} are "
                f"{_settings_text(kind)}; write {_example(spec.name, kind, form)}"
            )
        if name in values:
            raise ConfigError(f"{what} {spec.text!r} sets {name} twice; set it once")
        try:
            values[name] = _allowed(known[name]).kind(text)
        except ValueError:
            raise _refused(f"{what} {spec.name}", known[name], repr(text)) from None
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise _refused(f"{what} {spec.name}", field, "not set")
    return values


def spec_text(name: str, made: Any, form: str) -> str:
    """Return the specification of an object: its name, and the settings that are not default."""
    values = ((field, getattr(made, field.name)) for field in fields(made))
    changed = ",".join(f"{f.name}={value}" for f, value in values if value != f.default)
    return form.format(name, changed) if changed else name


def duration_s(text: str, unit: str = "") -> float | None:
    """Return the seconds in a text such as ``90s``, ``30m``, ``5min``, ``6h`` or ``2d``.

    A number alone is in ``unit``; without a unit, the result is ``None``.

    >>> duration_s("5min"), duration_s("1.5", unit="h"), duration_s("soon")
    (300.0, 5400.0, None)
    """
    found = _DURATION.fullmatch(text)
    unit_s = _UNITS_S.get(found[2] or unit) if found else None
    return None if found is None or unit_s is None else float(found[1]) * unit_s


def numbers(text: str, kind: Callable[[str], Any] = float) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        return ()


def _allowed(field: Field[Any]) -> Allowed:
    allowed: Allowed = field.metadata["allowed"]
    return allowed


def _settings_text(kind: type[Any]) -> str:
    return ", ".join(f"{field.name} ({_allowed(field)})" for field in fields(kind)) or "none"


def _example(name: str, kind: type[Any], form: str) -> str:
    for field in fields(kind):
        example = _allowed(field).example
        return form.format(name, f"{field.name}={field.default if example is None else example}")
    return name


def _refused(what: str, field: Field[Any], value: str) -> ConfigError:
    way_out = _allowed(field).instead or f"the default is {field.default}"
    return ConfigError(f"{what}: {field.name} is {value}, but must be {_allowed(field)}; {way_out}")
