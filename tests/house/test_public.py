"""Public names are exported and documented. Errors can be sent to another rank."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import evenstride
from evenstride import errors
from evenstride.errors import EvenstrideError, from_plain, to_plain
from tests.house.sources import ROOT

NAMES = [name for name in evenstride.__all__ if not name.startswith("__")]
ERRORS = [
    kind
    for _, kind in sorted(vars(errors).items())
    if isinstance(kind, type) and issubclass(kind, EvenstrideError)
]
SPECIAL: dict[str, tuple[Any, ...]] = {
    "InfeasibleShares": (3, 4, 64, 4),
    "UnknownPolicy": ("magic", ("adaptive", "uniform")),
}


def _members() -> Iterator[tuple[str, Any]]:
    """Yield every public method and property of the public classes, except those of errors."""
    for name in NAMES:
        public = getattr(evenstride, name)
        if not issubclass(public, EvenstrideError):
            for inner, value in vars(public).items():
                documented = inspect.isfunction(value) or isinstance(value, property)
                if documented and not inner.startswith("_"):
                    yield f"{name}.{inner}", value


def test_every_exported_name_exists_once_and_in_order() -> None:
    assert list(evenstride.__all__) == sorted(set(evenstride.__all__))
    for name in evenstride.__all__:
        assert getattr(evenstride, name) is not None


def test_every_public_name_of_the_package_is_exported() -> None:
    modules = {path.stem for path in (ROOT / "src" / "evenstride").iterdir()}
    found = {name for name in vars(evenstride) if not name.startswith("_")}
    allowed = {"annotations", "TYPE_CHECKING", "Any"}

    assert found - modules - allowed <= set(evenstride.__all__)


def test_a_missing_name_raises_the_usual_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'evenstride' has no attribute 'Strode'"):
        evenstride.Strode  # noqa: B018


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_opens_with_a_sentence_on_one_line(name: str) -> None:
    _opens_with_a_sentence(name, getattr(evenstride, name))


def _opens_with_a_sentence(name: str, value: object) -> None:
    first, *rest = (inspect.getdoc(value) or "").splitlines() or [""]
    assert re.search(r"[.?!]$", first), f"{name}: {first!r} does not end a sentence"
    assert not rest or not rest[0], f"{name}: the second line must be blank"


def test_every_public_method_documents_arguments_result_and_errors() -> None:
    methods = dict(_members())

    for name, value in methods.items():
        _opens_with_a_sentence(name, value)
        if not isinstance(value, property):
            _describes_its_interface(name, value)
    assert {"Stride.scale", "Stride.epoch", "Summary.to_dict"} <= methods.keys()


def _describes_its_interface(name: str, method: Callable[..., Any]) -> None:
    text, signature = inspect.getdoc(method) or "", inspect.signature(method)
    taken = [parameter for parameter in signature.parameters if parameter != "self"]
    if len(taken) > 1 or "Args:" in text:
        missing = [p for p in taken if not re.search(rf"^ +(\*\*)?{p}: ", text, re.MULTILINE)]
        assert not missing, f"the docstring of {name} does not describe {missing}"
    returned = str(signature.return_annotation)
    if returned != "None" and not returned.startswith("Iterator"):
        assert re.search("[Rr]eturn", text), f"the docstring of {name} does not describe its result"
    if any(isinstance(node, ast.Raise) for node in ast.walk(_tree(method))):
        assert "Raises:" in text, f"{name} raises an error that its docstring does not list"


def _tree(method: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))


def test_the_main_class_has_its_arguments_errors_and_an_example() -> None:
    text = inspect.getdoc(evenstride.Stride) or ""

    for section in ("Args:", "Raises:", "Example:", ">>> "):
        assert section in text
    for parameter in inspect.signature(evenstride.Stride).parameters:
        assert re.search(rf"^ +{parameter}: ", text, re.MULTILINE), parameter


def test_every_error_is_in_the_tree_of_the_module_docstring() -> None:
    tree = errors.__doc__ or ""

    for kind in ERRORS:
        assert re.search(rf"(^|── ){kind.__name__}\b", tree, re.MULTILINE), kind


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_can_be_sent_to_another_rank(kind: type[EvenstrideError]) -> None:
    error = kind(*SPECIAL.get(kind.__name__, ("invalid value 3: expected 1; change it",)))

    received = from_plain(json.loads(json.dumps(to_plain(error))))

    assert type(received) is kind
    assert str(received) == str(error) != ""
    assert vars(received) == vars(error)
    assert isinstance(received, EvenstrideError)


@pytest.mark.parametrize("name", ["Unheard", "to_plain", "Any", "annotations"])
def test_an_error_of_an_unknown_kind_is_received_as_an_evenstride_error(name: str) -> None:
    received = from_plain({"type": name, "arguments": ["from a later version"]})

    assert type(received) is EvenstrideError
    assert str(received) == "from a later version"


@pytest.mark.parametrize(
    ("total", "remedy"),
    [
        (3, "raise the global batch to at least 4, use fewer workers, or lower min_share"),
        (99, "lower the global batch to at most 64, raise max_share, or add a worker"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_a_remedy(total: int, remedy: str) -> None:
    text = str(errors.InfeasibleShares(total, 4, 64, 4))

    assert f"cannot split a global batch of {total} samples: the 4 workers" in text
    assert text.endswith(remedy)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    text = str(errors.UnknownPolicy("magic", ["adaptive", "uniform"]))

    assert "unknown policy 'magic'; available policies: adaptive, uniform" in text
