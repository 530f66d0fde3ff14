"""Settings from Pulsar's ``client.conf``, a TOML file and the environment, with their origins.

A later layer overrides an earlier one::

    1. the defaults of the classes
    2. client.conf      named by KEYSHARD_CLIENT_CONF, or by client_conf of the file
    3. the TOML file    named by KEYSHARD_CONFIG; tables connection, source, run and sink
    4. the environment  KEYSHARD_<NAME> for connection and source, KEYSHARD_RUN_<NAME> for run,
                        KEYSHARD_SINK_<NAME> for sink
    5. the program      arguments, or options of a command
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from keyshard.config.connection import Connection
from keyshard.config.connection_names import NAMES, client_conf_names, fields_of
from keyshard.config.handlers import HandlerConfig
from keyshard.config.sink import SinkConfig
from keyshard.config.source import SHORTHANDS, SourceConfig
from keyshard.core.option_checks import check_names
from keyshard.errors import ConfigError
from keyshard.redaction import redacted, shown

PREFIX = "KEYSHARD_"
CONFIG = "KEYSHARD_CONFIG"
"""Environment variable that names the TOML file."""
CLIENT_CONF = "client_conf"
FILE_BYTES_MAX = 1024 * 1024
"""Most bytes of a TOML file."""
_SECRETS = ("ui_token",)
"""Fields that are secrets and are stored as texts."""
DEFAULT = "default"
"""Origin of a value that is not set."""
OPTION = "option"
"""Origin of an option of a command."""
OTHERS = ("KEYSHARD_CACHE", "KEYSHARD_TEST_")
"""Beginnings of environment variables of the development broker and of tests."""
AUTH: Mapping[str, str] = {"auth_plugin": "authPluginClassName", "auth_params": "authParams"}
"""Pulsar's names of authentication options, by their names in files, variables and commands."""
_NAME_OF = {field: name for name, field in NAMES.items() if field != "authentication"}
CONNECTION: Mapping[str, str] = {**_NAME_OF, **AUTH}
"""Pulsar's names of connection options, by their names in files, variables and commands."""


def _kinds(config: type[Any], without: Collection[str]) -> dict[str, Any]:
    hints = get_type_hints(config)
    return {one.name: hints[one.name] for one in fields(config) if one.name not in without}


SOURCE = _kinds(SourceConfig, {"connection", "shorthands_of", *SHORTHANDS})
"""Fields of a source that can be set, and their types."""
RUN = _kinds(HandlerConfig, {"retry"})
"""Options of a run that can be set, and their types."""
SINK = _kinds(SinkConfig, {"connection", *SHORTHANDS})
"""Fields of a sink that can be set, and their types."""
_CONFIGS: Mapping[str, tuple[type[Any], Mapping[str, Any]]] = {
    "source": (SourceConfig, SOURCE), "run": (HandlerConfig, RUN), "sink": (SinkConfig, SINK),
}  # fmt: skip
"""Class, and fields that can be set, of each table but that of the connection."""
_TABLES: Mapping[str, Collection[str]] = {
    "connection": [CLIENT_CONF, *CONNECTION],
    **{table: kinds for table, (_, kinds) in _CONFIGS.items()},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One value, and where it comes from."""

    table: str
    """``connection``, ``source``, ``run`` or ``sink``."""
    name: str
    value: Any
    origin: str

    @property
    def text(self) -> str:
        """The value as text for display; secrets are hidden."""
        value = self.value
        if self.name in _SECRETS and value is not None:
            return "***"
        if isinstance(value, str):
            return redacted(value)
        if isinstance(value, Sequence):
            return ", ".join(map(redacted, map(str, value)))
        return "" if value is None else redacted(repr(value))


class Settings:
    """Settings of a program; see :func:`read_settings`."""

    def __init__(self, connection: Connection, given: Sequence[Setting], unused: Sequence[str]):
        self._connection = connection
        self._given = {(one.table, one.name): one for one in given}
        self.unused = tuple(unused)
        """Environment variables that begin with ``KEYSHARD_`` and set nothing."""

    def connection(self, **given: Any) -> Connection:
        """Return the connection; arguments override its fields.

        Raises:
            ConfigError: A value is wrong.
        """
        return replace(self._connection, **given)

    def for_source(self, **given: Any) -> dict[str, Any]:
        """Return the arguments of :class:`keyshard.KeyShardSource`; arguments override them.

        ::

            source = KeyShardSource(**read_settings().for_source(topics="orders"))

        Raises:
            ConfigError: A value of the connection is wrong.
        """
        return self._connected("source", given)

    def for_sink(self, **given: Any) -> dict[str, Any]:
        """Return the arguments of :class:`keyshard.KeyShardSink`; arguments override them.

        ::

            sink = KeyShardSink(**read_settings().for_sink(topic="bills", sink_id="billing"))

        Raises:
            ConfigError: A value of the connection is wrong.
        """
        return self._connected("sink", given)

    def for_run(self, **given: Any) -> dict[str, Any]:
        """Return the options of :meth:`keyshard.KeyShardSource.run`; arguments override them."""
        return self._of("run") | given

    def all(self) -> list[Setting]:
        """Return every setting, those with defaults included, in the order of the tables."""
        found = [self._one("connection", one.name, getattr(self._connection, one.name))
                 for one in fields(Connection)]  # fmt: skip
        if ("connection", CLIENT_CONF) in self._given:
            found.insert(0, self._given["connection", CLIENT_CONF])
        for table, (config, names) in _CONFIGS.items():
            found += [
                self._one(table, one.name, None if one.default is MISSING else one.default)
                for one in fields(config)
                if one.name in names
            ]
        return found

    def _connected(self, table: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a class that connects; URLs override those of the connection."""
        if "connection" not in given:
            own = {name: given.pop(name) for name in SHORTHANDS if name in given}
            given["connection"] = self.connection(**own)
        return self._of(table) | given

    def _of(self, table: str) -> dict[str, Any]:
        return {name: one.value for (where, name), one in self._given.items() if where == table}

    def _one(self, table: str, name: str, value: Any) -> Setting:
        return self._given.get((table, name), Setting(table, name, value, DEFAULT))


def read_settings(
    path: str | os.PathLike[str] | None = None,
    *,
    client_conf: str | os.PathLike[str] | None = None,
    options: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Read the settings of a program.

    Args:
        path: TOML file; default: that of ``KEYSHARD_CONFIG``, else none.
        client_conf: Pulsar's ``client.conf``; default: that of ``KEYSHARD_CLIENT_CONF``, else that
            of the file, else none.
        options: Options of a command for the connection, by Pulsar's names. They override all.
        environ: Environment; default: that of this process.

    Raises:
        ConfigError: A file cannot be read, or a name or value is wrong. Contains no secret.
    """
    environ = os.environ if environ is None else environ
    path = path or environ.get(CONFIG) or None
    tables = {} if path is None else _read_toml(Path(path))
    named = tables.get("connection", {}).pop(CLIENT_CONF, None)
    given = [] if path is None else _file_settings(Path(path), tables)
    variable = f"{PREFIX}{CLIENT_CONF.upper()}"
    settings = {(one.table, one.name): one for one in given if one.table != "connection"}
    settings |= {(one.table, one.name): one for one in _environment(environ)}

    layers: list[dict[str, tuple[str, str]]] = []
    where: Setting | None = None
    if client_conf is not None:
        where = Setting("connection", CLIENT_CONF, os.fspath(client_conf), "argument")
    elif environ.get(variable):
        where = Setting("connection", CLIENT_CONF, environ[variable], f"environment {variable}")
    elif named is not None:
        assert path is not None
        text = _text_of("connection", CLIENT_CONF, named)
        where = Setting("connection", CLIENT_CONF, str(Path(path).parent / text), f"file {path}")
    if where is not None:
        names = client_conf_names(where.value)
        layers.append({name: (text, f"file {where.value}") for name, text in names.items()})
        settings["connection", CLIENT_CONF] = where
    layers.append(
        {
            CONNECTION[one.name]: (one.value, one.origin)
            for one in given
            if one.table == "connection"
        }
    )
    layers.append(
        {
            name: (environ[f"{PREFIX}{own.upper()}"], f"environment {PREFIX}{own.upper()}")
            for own, name in CONNECTION.items()
            if environ.get(f"{PREFIX}{own.upper()}")
        }
    )
    layers.append({name: (text, OPTION) for name, text in (options or {}).items()})
    connection, origins = _connect(layers)
    for name, origin in origins.items():
        settings["connection", name] = Setting(
            "connection", name, getattr(connection, name), origin
        )
    return Settings(connection, list(settings.values()), _unused(environ))


def _connect(
    layers: Sequence[Mapping[str, tuple[str, str]]],
) -> tuple[Connection, Mapping[str, str]]:
    """Return the connection of all layers, and the origin of each field that one sets."""
    said: dict[str, tuple[str, str]] = {}
    for layer in layers:
        if AUTH["auth_plugin"] in layer:
            # Parameters of an earlier layer belong to that layer's plugin, not to the new one.
            said.pop(AUTH["auth_params"], None)
        said |= layer
    values = {name: text for name, (text, _) in said.items()}
    try:
        made = fields_of(values)
        connection = Connection(**made)
    except ConfigError as exc:
        told = [
            f" {own} comes from {said[name][1]}."
            for own, name in CONNECTION.items()
            if name in said
            and said[name][1] != OPTION
            and (own in exc.message or name in exc.message)
        ]
        raise exc.with_text(exc.problem + "".join(told), exc.remedy) from None
    origins = {NAMES[name]: origin for name, (_, origin) in said.items() if NAMES[name] in made}
    # A certificate may stand in the parameters.
    _, by_params = said.get(AUTH["auth_params"], ("", DEFAULT))
    rest = dict.fromkeys(made.keys() - origins.keys(), by_params)
    return connection, origins | rest


def _read_toml(path: Path) -> dict[str, dict[str, Any]]:
    """Read a TOML file, and check the names of its tables and settings."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise ConfigError(
            f"The configuration {shown(str(path))} cannot be read: {exc.strerror}.",
            f"Correct the path in {CONFIG} or --config.",
        ) from exc
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(
            f"The configuration {shown(str(path))} has more than {FILE_BYTES_MAX:,} bytes.",
            "Name a TOML file with settings.",
        )
    try:
        toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ConfigError(
            "Python 3.10 reads no TOML.", "Install the package tomli, or use Python 3.11 or newer."
        ) from None
    try:
        tables = toml.loads(text.decode())
    except (ValueError, RecursionError) as exc:
        # The text of a decoding error may contain values.
        why = f": {exc}" if type(exc) is toml.TOMLDecodeError else ""
        raise ConfigError(
            f"The configuration {shown(str(path))} is not valid TOML{why}.", "Correct it."
        ) from None
    check_names(f"The configuration {path}", tables, _TABLES)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{name} of {path} is no table.", f"Write [{name}].")
        check_names(f"[{name}] of {path}", table, _TABLES[name])
    found: dict[str, dict[str, Any]] = tables
    return found


def _file_settings(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> list[Setting]:
    return [
        Setting(table, name, _of_file(table, name, value), f"file {path}")
        for table, values in tables.items()
        for name, value in values.items()
    ]


def _of_file(table: str, name: str, value: Any) -> Any:
    """Convert a value of a TOML file; that of a connection to text, as in ``client.conf``."""
    if table == "connection":
        return _text_of(table, name, value)
    return tuple(value) if isinstance(value, list) else value


def _text_of(table: str, name: str, value: Any) -> str:
    if type(value) is bool:
        return str(value).lower()
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or not value:
        hidden = shown(value) if name not in AUTH else "no text"
        raise ConfigError(
            f"{name} of [{table}] is {hidden}.", "Write a text, a number or a boolean."
        )
    return value


def _environment(environ: Mapping[str, str]) -> list[Setting]:
    """Return the settings that the environment has, without those of the connection."""
    found = []
    for table, (_, kinds) in _CONFIGS.items():
        for name, kind in kinds.items():
            variable = _variable(table, name)
            if text := environ.get(variable):
                value = _parsed(variable, text, kind)
                found.append(Setting(table, name, value, f"environment {variable}"))
    return found


def _variable(table: str, name: str) -> str:
    """Return the environment variable of a setting."""
    own = f"{table.upper()}_" if table in ("run", "sink") else ""
    return f"{PREFIX}{own}{name.upper()}"


def variables() -> set[str]:
    """Return the names of all environment variables of settings."""
    return {CONFIG, *(_variable(table, name) for table, names in _TABLES.items() for name in names)}


def _unused(environ: Mapping[str, str]) -> list[str]:
    known = variables()
    return sorted(
        name
        for name in environ
        if name.startswith(PREFIX) and name not in known and not name.startswith(OTHERS)
    )


_WANTED: Mapping[Any, tuple[Callable[[str], Any], str]] = {
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
    int: (int, "an integer"),
    float: (float, "a number"),
}


def _parsed(variable: str, text: str, kind: Any) -> Any:
    """Parse the text of an environment variable as the type ``kind`` of its field."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if any(get_origin(one) is Sequence for one in kinds):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    for one in kinds:
        if one in _WANTED:
            parse, wanted = _WANTED[one]
            try:
                return parse(text)
            except (ValueError, KeyError):
                raise ConfigError(
                    f"{variable} is {shown(text)}; it must be {wanted}.", "Correct the environment."
                ) from None
    return text
