"""Errors: codes, texts, and crossing process borders."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

from keyshard import errors
from keyshard.base_error import placed
from keyshard.core.lanes.failure import times
from keyshard.error_reference import REFERENCES, document, meaning, remedy_of
from keyshard.errors import BY_CODE, BrokerError, ConfigError, KeyShardError, UnreadableEntryError
from tests.support.command_line import run
from tests.support.error_text import has_error_form

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, KeyShardError)
]
ROOT = Path(__file__).parents[2]
PACKAGES = ("keyshard", "spark_adapter", "ray_adapter")
DOCS = ROOT / "docs" / "errors.md"


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(CLASSES) > 20
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"KEYSHARD_[A-Z]+(_[A-Z]+)*", code) for code in codes)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_text_has_a_line_for_cause_place_remedy_and_page(cls: type[KeyShardError]) -> None:
    error = cls("The broker is away.", "Start it.")
    page = f"More: docs/errors.md#{cls.code.lower()}, or run: keyshard error {cls.code}"
    assert str(error) == f"[{cls.code}] The broker is away.\nRemedy: Start it.\n{page}"
    assert error.summary == f"[{cls.code}] The broker is away. Start it."
    with pytest.raises(cls), placed("an outer place"), placed("source of t"):
        raise error
    assert str(error).splitlines()[1:3] == ["Place: source of t", "Remedy: Start it."]
    assert has_error_form(str(error))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_without_a_remedy_shows_that_of_its_class(cls: type[KeyShardError]) -> None:
    (expected,) = [one.remedy for one in REFERENCES if one.error is cls]
    plain = expected.replace("`", "")
    assert str(cls("It failed.")).splitlines()[1] == f"Remedy: {plain}"
    assert cls("It failed.").message == "It failed."


def test_a_class_of_a_program_has_the_remedy_of_its_base() -> None:
    class OwnError(ConfigError):
        pass

    assert remedy_of(OwnError) == remedy_of(ConfigError)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_pickling_keeps_class_message_and_facts(cls: type[KeyShardError]) -> None:
    error = cls("It went wrong.", "Mend it.", topic="t", count=3)
    error.place = "source of t"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (str(copy), copy.message, copy.facts) == (
        str(error), "It went wrong. Mend it.", error.facts
    )  # fmt: skip
    assert error.facts == {"topic": "t", "count": 3}


def test_the_tree_in_the_docstring_names_every_class_and_code_below_its_parent() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, tuple[str, bool]] = {}
    parents: dict[str, str | None] = {}
    path: list[str] = []
    line = re.compile(r"^([ │├└─]*)(\w+) +(KEYSHARD_\w+)( +\(retriable\))?$")
    for text in errors.__doc__.splitlines():
        if match := line.match(text):
            depth = (len(match[1]) - 4) // 4
            path[depth:] = [match[2]]
            parents[match[2]] = path[depth - 1] if depth else None
            drawn[match[2]] = match[3], bool(match[4])
    assert drawn == {cls.__name__: (cls.code, cls.retriable) for cls in CLASSES}
    root = KeyShardError.__name__
    inner = BrokerError, ConfigError, UnreadableEntryError
    assert parents.pop(root) is None
    assert parents == {
        cls.__name__: next((one.__name__ for one in inner if one in cls.__bases__), root)
        for cls in CLASSES
        if cls is not KeyShardError
    }


def test_only_errors_that_may_pass_by_themselves_are_retriable() -> None:
    assert {cls.__name__ for cls in CLASSES if cls.retriable} == {
        "BrokerUnavailableError",
        "LimitReachedError",
        "ProducerBusyError",
        "QuotaExceededError",
        "RangeConflictError",
        "ReplayTimeoutError",
    }


def test_an_option_error_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="KEYSHARD_BAD_OPTION"):
        raise ConfigError("parallelism is 0.")


def test_an_error_with_a_huge_value_keeps_its_beginning_and_its_advice() -> None:
    error = KeyShardError(f"The checkpoint {'x' * 100_000} is no file.", "Name another one.")
    assert len(str(error)) < 2_000
    assert "The checkpoint xxx" in str(error)
    assert "x is no file.\nRemedy: Name another one.\n" in str(error)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ValueError: no such key.. Nothing is acknowledged.",
         "ValueError: no such key. Nothing is acknowledged."),
        ("it said: away!.", "it said: away!"),
        ("wait ... for it...", "wait ... for it..."),
        ("the folder /a/.. is none.", "the folder /a/.. is none."),
        ("pulsar://a.b..c is no URL.", "pulsar://a.b..c is no URL."),
    ],
)  # fmt: skip
def test_a_quoted_text_that_ends_with_a_full_stop_gets_no_second_one(text: str, shown: str) -> None:
    assert KeyShardError(text).message == shown


def test_a_count_of_one_is_shown_as_once() -> None:
    assert [times(count) for count in (1, 2, 1_000)] == ["once", "2 times", "1,000 times"]


def test_every_error_has_a_cause_and_a_remedy() -> None:
    codes = [one.error.code for one in REFERENCES]
    assert codes == re.findall(r"KEYSHARD_[A-Z_]+", errors.__doc__ or "")
    assert set(codes) == set(BY_CODE)
    assert all(
        text.endswith(".") and re.match("[A-Z`]|keyshard ", text)
        for one in REFERENCES
        for text in (meaning(one.error), one.cause, one.remedy)
    )


def test_the_error_reference_is_the_table_as_it_is_now() -> None:
    assert DOCS.read_text() == document(), (
        "write it: python -m keyshard.error_reference > docs/errors.md"
    )


def test_problems_and_remedies_of_the_code_are_sentences() -> None:
    """Each ends with a full stop. A remedy begins with a capital letter, and stands alone."""
    names = {cls.__name__ for cls in CLASSES}
    wrong = []
    for file in sorted(one for package in PACKAGES for one in (ROOT / package).rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in names:
                problem, remedy = [*map(_text, call.args), "X.", "X."][:2]
                if not problem.endswith((".", "x")) or not re.fullmatch(
                    r"(?s)x|[A-Zx`].*[.?x]", remedy
                ):
                    wrong.append(f"{file.name}:{call.lineno}: {problem} | {remedy}")
                if re.search("; (write|give|name|set|use) ", problem):
                    wrong.append(f"{file.name}:{call.lineno}: {problem} has a remedy")
    assert wrong == []


@pytest.mark.parametrize("name", ["KEYSHARD_STOPPED", "[keyshard_stopped]", "stopped"])
def test_a_command_explains_a_code(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "error", name)
    assert (code, err) == (0, "")
    assert out in document()
    assert out.startswith("## KEYSHARD_STOPPED\n")


def test_a_command_lists_all_codes_and_names_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "error")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == [
        one.error.code for one in REFERENCES
    ]
    code, _, err = run(capsys, "error", "TOPIC_NOT_FOUN")
    assert code == 2
    assert "Remedy: Did you mean 'KEYSHARD_TOPIC_NOT_FOUND'?" in err


def _text(argument: ast.expr) -> str:
    """Return the text of an argument, with ``x`` for each value in it."""
    if isinstance(argument, ast.JoinedStr):
        return "".join(_text(part) for part in argument.values)
    return str(argument.value) if isinstance(argument, ast.Constant) else "x"
