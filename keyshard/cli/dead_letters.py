"""``keyshard dead-letters``: list, show, replay or discard the dead letters of a source."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from keyshard.cli.connecting import ClientConfOption, connection_of, source_of
from keyshard.cli.dead_letter_text import (
    FORMATS,
    SCHEMA,
    decoded_text,
    plan_text,
    print_table,
    row_of,
    shown_text,
)
from keyshard.cli.output import (
    ASK_TIMEOUT_S,
    JsonOption,
    PidOption,
    ServiceUrlOption,
    SubscriptionOption,
    console,
    plural,
)
from keyshard.core.option_checks import duration_ms
from keyshard.errors import ConfigError
from keyshard.redaction import shown

if TYPE_CHECKING:
    from keyshard.config.connection import Connection
    from keyshard.control import RunningSource
    from keyshard.core.dead_letter_filter import DeadLetterFilter
    from keyshard.dead_letters.browser import DeadLetterBrowser
    from keyshard.observe.dead_letter_requests import (
        ListedDeadLetter,
        ListedPage,
        ShownDeadLetter,
    )

PAGE = 1_000
"""Most dead letters in one answer of a source."""

dead_letters_app = typer.Typer(
    help="List, show, replay or discard dead letters. Conditions combine: a dead letter matches "
    "if it fulfils each of them.",
    no_args_is_help=True,
)

KeyOption = Annotated[
    str | None,
    typer.Option("--key", help="Dead letters of this routing key: the ordering key, else the key."),
]
TopicOption = Annotated[
    str | None, typer.Option("--topic", help="Dead letters of messages of this topic.")
]
ErrorOption = Annotated[
    str | None,
    typer.Option(
        "--error",
        help="Dead letters with this kind of error: a class such as ValueError, or waiting, "
        "rejected or other.",
    ),
]
OlderOption = Annotated[
    str | None,
    typer.Option(
        "--older-than", help="Dead letters written longer ago than this: 90s, 15m, 6h or 2d."
    ),
]
NewerOption = Annotated[
    str | None,
    typer.Option("--newer-than", help="Dead letters written more recently than this."),
]
RejectedOption = Annotated[
    bool,
    typer.Option(
        "--rejected",
        help="Instead of dead letters of parked keys: rejected ones, and those stored without "
        "their key.",
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="Every dead letter, without conditions.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan, and do nothing.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")]
DeadLetterTopicOption = Annotated[
    str | None,
    typer.Option(
        "--dead-letter-topic",
        help="Read this topic with --subscription, --service-url and --client-conf; no running "
        "source is needed.",
    ),
]


@dead_letters_app.command("list")
def list_dead_letters(  # noqa: PLR0917 - one argument per option
    key: KeyOption = None,
    topic: TopicOption = None,
    error: ErrorOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    rejected: RejectedOption = False,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=10**9, help="Most dead letters to list.")
    ] = 100,
    dead_letter_topic: DeadLetterTopicOption = None,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """List dead letters in the order in which they were written. Changes nothing."""

    given = _conditions(key, topic, error, older_than, newer_than, rejected=rejected)
    found: list[ListedDeadLetter] = []
    examined, has_more = 0, False
    named = _Named(dead_letter_topic, subscription, service_url, client_conf, pid)
    with (
        _pages(named, given, limit) as pages,
        console(stderr=True).status("Reading") as progress,
    ):
        for page in pages:
            found += page["deadLetters"]
            examined += page["examined"]
            has_more = page["next"] is not None
            progress.update(f"Read {plural(examined, 'message')}, found {len(found):,}")
            if len(found) >= limit:
                break
    if as_json:
        typer.echo(json.dumps({"deadLetters": found, "examined": examined, "more": has_more}))
        return
    if found:
        print_table([row_of(one) for one in found])
    what = "rejected dead letter" if rejected else "dead letter"
    end = "; --limit lists more" if has_more else ""
    typer.echo(f"{plural(len(found), what)}, {plural(examined, 'message')} read{end}.")
    if not (rejected or found):
        typer.echo("These were dead letters of parked keys. --rejected lists the others.")


@dead_letters_app.command()
def show(  # noqa: PLR0917 - one argument per option
    message_id: Annotated[
        str, typer.Argument(help="Id of the message, as the list has it: ledger:entry:index.")
    ],
    as_format: Annotated[
        str,
        typer.Option("--format", help="Form of the value: text, json, hex or schema (decoded)."),
    ] = "text",
    topic: Annotated[
        str | None, typer.Option("--topic", help="Topic of the message, if ids are not unique.")
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition", min=-1, max=2**31 - 1, help="Topic partition of the message, likewise."
        ),
    ] = None,
    dead_letter_topic: DeadLetterTopicOption = None,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter: its error, its properties and its value. Changes nothing."""
    from keyshard.core.option_checks import check_choice
    from keyshard.core.topic_segments import received_topic_name
    from keyshard.observe.dead_letter_requests import (
        decoded_value,
        message_id_of,
        shown_dead_letter,
    )

    check_choice("--format", as_format, *FORMATS, SCHEMA)
    wanted = message_id_of(message_id)
    by_schema = {SCHEMA: True} if as_format == SCHEMA else {}
    found: ShownDeadLetter
    named = _Named(dead_letter_topic, subscription, service_url, client_conf, pid)
    if dead_letter_topic is None:
        source = named.source()
        found = source.ask(
            "dead_letter", timeout_s=ASK_TIMEOUT_S, id=str(wanted), topic=topic,
            partition=partition, **by_schema,
        )  # fmt: skip
        with source.read():
            text, value = shown_text(found)
            if by_schema:
                decoded = decoded_text(found)
    else:
        with _stored(named, dead_letter_topic) as browser:
            topic = None if topic is None else received_topic_name(topic)
            one = browser.one(wanted, topic, partition)
        found = shown_dead_letter(one)
        if by_schema:
            found["decoded"] = decoded_value(named.connection(), one)
            decoded = decoded_text(found)
        text, value = shown_text(found)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        if value is not None or by_schema:
            text += "\n" + (decoded if by_schema else FORMATS[as_format](value or b""))
        typer.echo(text)


@dead_letters_app.command()
def replay(  # noqa: PLR0917 - one argument per option
    key: KeyOption = None,
    topic: TopicOption = None,
    error: ErrorOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    every: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Unpark the keys of matching dead letters: a running source replays them in order.

    A key is replayed as a whole, so that no dead letter runs before an earlier one of its key.
    Newer messages of the key follow. A confirmation is needed unless a key is named.
    """
    given = _conditions(key, topic, error, older_than, newer_than)
    fields = _stated(given, every=every)
    source = source_of(subscription, service_url, client_conf, pid)
    if dry_run or not (yes or key is not None):
        plan = source.ask("unpark", timeout_s=ASK_TIMEOUT_S, dry_run=True, **fields)
        with source.read():
            what = f"{plural(plan['deadLetters'], 'dead letter')} of {plural(plan['keys'], 'key')}"
            text = plan_text(plan, f"A replay takes {what}, whole keys in order")
        if dry_run:
            typer.echo(json.dumps(plan) if as_json else text)
            return
        if plan["keys"]:
            _confirm(f"Replay {what} of {source.subscription!r}", "replayed")
    answer = source.ask("unpark", timeout_s=ASK_TIMEOUT_S, **fields)
    with source.read():
        count, keys = answer["deadLetters"], plural(answer["keys"], "key")
        typer.echo(
            json.dumps(answer)
            if as_json
            else f"Unparking {keys}: {plural(count, 'dead letter')} in order, then newer messages."
            if answer["keys"]
            else "No parked key matches."
        )


@dead_letters_app.command()
def discard(  # noqa: PLR0917 - one argument per option
    key: KeyOption = None,
    topic: TopicOption = None,
    error: ErrorOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    rejected: RejectedOption = False,
    every: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Discard matching dead letters of a running source for good.

    The other dead letters of a key keep their order. A key without dead letters is not parked. A
    confirmation is needed unless a key is named.
    """
    given = _conditions(key, topic, error, older_than, newer_than, rejected=rejected)
    fields = _stated(given, every=every)
    source = source_of(subscription, service_url, client_conf, pid)
    if dry_run or not (yes or key is not None):
        plan = source.ask("discard", timeout_s=ASK_TIMEOUT_S, dry_run=True, **fields)
        with source.read():
            what = plural(plan["deadLetters"], "dead letter")
            if not rejected:
                what += f" of {plural(plan['keys'], 'key')}"
            text = plan_text(plan, f"A discard takes {what}")
        if dry_run:
            typer.echo(json.dumps(plan) if as_json else text)
            return
        if plan["deadLetters"]:
            _confirm(
                f"Discard {what} of {source.subscription!r}", "discarded", "This cannot be undone."
            )
    answer = source.ask("discard", timeout_s=ASK_TIMEOUT_S, **fields)
    with source.read():
        typer.echo(
            json.dumps(answer)
            if as_json
            else f"{plural(answer['deadLetters'], 'dead letter')} discarded."
        )


# -- Conditions ------------------------------------------------------------------------------------


def _conditions(
    key: str | None,
    topic: str | None,
    error: str | None,
    older_than: str | None,
    newer_than: str | None,
    *,
    rejected: bool = False,
) -> DeadLetterFilter:
    from keyshard.core.dead_letter_filter import DeadLetterFilter
    from keyshard.core.ring.key_slot import broker_text

    return DeadLetterFilter(
        None if key is None else broker_text(key), topic, error,
        _seconds("--older-than", older_than), _seconds("--newer-than", newer_than), rejected,
    )  # fmt: skip


def _stated(given: DeadLetterFilter, *, every: bool) -> dict[str, Any]:
    """Return the fields of a request for a replay or discard, which needs a condition or --all."""
    given.checked(every)
    return given.given() | ({"all": True} if every else {})


def _seconds(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    found = duration_ms(text)
    if found is None:
        raise ConfigError(
            f"{option} is {shown(text)}.", "Write a number with s, m, h or d, such as 15m."
        )
    return found / 1000


# -- Reading dead letters --------------------------------------------------------------------------


class _Named(NamedTuple):
    """Options that name a running source, or a dead-letter topic."""

    dead_letter_topic: str | None
    subscription: str | None
    service_url: str | None
    client_conf: Path | None
    pid: int | None

    def connection(self) -> Connection:
        return connection_of(self.client_conf, {"service_url": self.service_url})

    def source(self) -> RunningSource:
        return source_of(self.subscription, self.service_url, self.client_conf, self.pid)


@contextmanager
def _pages(named: _Named, given: DeadLetterFilter, limit: int) -> Iterator[Iterator[ListedPage]]:
    """Yield the pages of a list: of a running source, or of a topic."""
    if named.dead_letter_topic is None:
        yield _asked(named.source(), given, limit)
        return
    with _stored(named, named.dead_letter_topic) as browser:
        yield _read(browser, given, limit)


def _asked(source: RunningSource, given: DeadLetterFilter, limit: int) -> Iterator[ListedPage]:
    fields, start = given.given(), None
    while True:
        most = min(limit, PAGE)
        page = source.ask("dead_letters", timeout_s=ASK_TIMEOUT_S, limit=most, **fields)
        with source.read():
            following, count = page["next"], len([row_of(one) for one in page["deadLetters"]])
            if int(page["examined"]) < 0 or (following is not None and following == start):
                raise ValueError(f"the page after {start} begins there again")
        yield page
        limit -= count
        if following is None or not limit:
            return
        fields["from"] = start = following


def _read(browser: DeadLetterBrowser, given: DeadLetterFilter, limit: int) -> Iterator[ListedPage]:
    from keyshard.observe.dead_letter_requests import listed_page

    start = None
    while True:
        page = browser.page(given, start, min(limit, PAGE))
        yield listed_page(page)
        limit -= len(page.dead_letters)
        if page.next is None or not limit:
            return
        start = page.next


@contextmanager
def _stored(named: _Named, topic: str) -> Iterator[DeadLetterBrowser]:
    """Open a dead-letter topic without a running source.

    Raises:
        ConfigError: No subscription is named.
        TopicNotFoundError: The topic does not exist.
    """
    from contextlib import closing

    from keyshard.broker.connect import connect, connect_admin
    from keyshard.config.source import SourceConfig
    from keyshard.core.position.entry import full_topic_name
    from keyshard.dead_letters.startup import open_browser

    if named.subscription is None:
        raise ConfigError(
            "--dead-letter-topic needs the subscription of the source that wrote it.",
            "Add --subscription.",
        )
    connection = named.connection()
    name = full_topic_name(topic)
    config = SourceConfig(name, subscription=named.subscription, connection=connection)
    with closing(connect(connection)) as broker:
        if connection.admin_url is None:
            yield open_browser(broker, None, config, name)
            return
        with closing(connect_admin(connection)) as admin:
            yield open_browser(broker, admin, config, name)


def _confirm(question: str, done: str, warning: str = "") -> None:
    """Ask the user to confirm; abort the command unless the answer is yes.

    Args:
        question: The question, without its question mark.
        done: Past participle of the action, for the error.
        warning: Sentence after the question.

    Raises:
        ConfigError: Standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError(
            f"There is no terminal to confirm: {question}? Nothing was {done}.", "Add --yes."
        )
    typer.confirm(" ".join(filter(None, [f"{question}?", warning])), abort=True, err=True)
