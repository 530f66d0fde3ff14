"""A real Pulsar broker on this machine, for development and tests."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from keyshard.base_error import first_line
from keyshard.config.connection import Connection, Token
from keyshard.config.connection_names import fields_of
from keyshard.core.releases import DEFAULT_VERSION, Version
from keyshard.errors import ConfigError, DevBrokerError
from keyshard.testing.devbroker.distribution import install, template
from keyshard.testing.devbroker.java import class_options, java_of, jvm_command
from keyshard.testing.devbroker.process import (
    LOOPBACK,
    BrokerProcess,
    LogWatch,
    ProcessOwner,
    StartedByBlock,
    StartResult,
    free_port,
    give_back,
    loopback_interface,
    port_is_free,
    start_error,
    wait_until_ready,
)
from keyshard.testing.devbroker.security import (
    ADMIN,
    Authority,
    TokenSigner,
    tls_settings,
    token_settings,
)

_ARCHIVE_TIMEOUT_S = 120.0
"""Longest time in which an ending JVM writes the archive of its classes, seconds."""
_MEMORY = "-Xms256m -Xmx1g -XX:MaxDirectMemorySize=1g"
_STATE = "devbroker.json"


class DevBroker(StartedByBlock, ProcessOwner):
    """A Pulsar standalone broker that listens on the loopback address only.

    Several can run side by side, each with its own ports and data directory. As a context manager
    it starts on entry, and stops on exit, when a temporary data directory is removed too.

    ::

        with DevBroker() as broker:
            client = pulsar.Client(broker.service_url)

    Unless ``detached``, a broker ends with the process that started it, even if that is killed.
    """

    def __init__(
        self,
        version: str = DEFAULT_VERSION,
        port: int | None = None,
        admin_port: int | None = None,
        data_dir: Path | str | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        detached: bool = False,
        tls: bool = False,
        tokens: bool = False,
        optimised: bool = False,
    ) -> None:
        """Describe a broker; nothing is started yet.

        Args:
            version: Pulsar version; fetched on the first start ever.
            port: Port of the binary protocol; a free one by default.
            admin_port: Port of the admin REST interface; a free one by default.
            data_dir: Directory of its data and log; by default a temporary directory that
                :meth:`close` removes.
            settings: Lines for the broker's configuration, such as
                ``{"managedLedgerMaxEntriesPerLedger": "1000"}``. If they ask for credentials, give
                ``brokerClientAuthenticationPlugin`` and ``brokerClientAuthenticationParameters``
                of a superuser, too.
            detached: Whether it outlives this process.
            tls: Whether both ports use TLS, with certificates of the broker's own authority.
            tokens: Whether every client needs a token (or a certificate, with ``tls``), and every
                role but ``admin`` needs grants.
            optimised: Whether its JVM compiles as for a long run, to measure it under load.

        Raises:
            ConfigError: A port or a setting is not possible.
        """
        for named in (port, admin_port):
            if named is not None and not 1 <= named <= 65_535:
                raise ConfigError(f"A port must be from 1 to 65535, but is {named}.")
        if port is not None and port == admin_port:
            raise ConfigError(f"port and admin_port are both {port}; they must differ.")
        render_config("", settings or {})
        for name in ("brokerServicePort", "webServicePort"):
            if not tls and (settings or {}).get(name) == "":
                raise ConfigError(f"{name} is empty.", "For a broker with TLS only, set tls=True.")
        self.version = version
        self._port = port
        self._admin_port = admin_port
        self._bookie_port: int | None = None
        self._temporary = data_dir is None
        self._data_dir = Path(data_dir).absolute() if data_dir is not None else None
        self._settings = dict(settings or {})
        self._detached = detached
        self._tls = tls
        self._tokens = tokens
        self._optimised = optimised
        self._class_options: Sequence[str] | None = None

    def __repr__(self) -> str:
        state = f"running, pid {self.pid}" if self.is_running() else "not running"
        where = f"{self._port or 'any port'}, {self._data_dir or 'temporary data'}"
        return f"<DevBroker {self.version} on {where}: {state}>"

    @property
    def port(self) -> int:
        """Port of the binary protocol."""
        if self._port is None:
            self._port = free_port({self._admin_port or 0, self._bookie_port or 0})
        return self._port

    @property
    def admin_port(self) -> int:
        """Port of the admin REST interface."""
        if self._admin_port is None:
            self._admin_port = free_port({self.port, self._bookie_port or 0})
        return self._admin_port

    @property
    def service_url(self) -> str:
        """URL for Pulsar clients."""
        return f"{'pulsar+ssl' if self._tls else 'pulsar'}://{LOOPBACK}:{self.port}"

    @property
    def admin_url(self) -> str:
        """URL of the admin REST interface."""
        return f"{'https' if self._tls else 'http'}://{LOOPBACK}:{self.admin_port}"

    @property
    def bookies_map(self) -> dict[str, str]:
        """Address of the bookie of the running broker by its name, for ``Segments``.

        Pulsar 5 names the bookie of a standalone broker ``bk-0``, which is no address.
        """
        assert self._bookie_port is not None, "it was started"
        return {"bk-0": f"{LOOPBACK}:{self._bookie_port}"}

    @property
    def connection(self) -> Connection:
        """Connection to the broker.

        With ``tokens``, it authenticates as role ``admin``. Otherwise it uses the credentials of
        the broker's own clients, if the settings have some.

        Raises:
            ConfigError: Those credentials cannot be read.
        """
        named = {
            "authPluginClassName": self._settings.get("brokerClientAuthenticationPlugin", ""),
            "authParams": self._settings.get("brokerClientAuthenticationParameters", ""),
        }
        own = fields_of(named) if named["authPluginClassName"] and not self._tokens else {}
        if self._tokens:
            own = {"authentication": Token(self.signer.token(ADMIN))}
        return Connection(
            self.service_url,
            self.admin_url,
            tls_trust_certs_file_path=self.authority.path if self._tls else None,
            **own,
        )

    @property
    def authority(self) -> Authority:
        """Authority of its certificate and those of its clients; for a broker with ``tls``."""
        return Authority(self.data_dir / "security")

    @property
    def signer(self) -> TokenSigner:
        """Signer of the tokens that it accepts; for a broker with ``tokens``."""
        return TokenSigner(self.data_dir / "security")

    @property
    def data_dir(self) -> Path:
        """Directory of its data, its configuration and its log."""
        if self._data_dir is None:
            self._data_dir = Path(tempfile.mkdtemp(prefix="keyshard-broker-"))
        return self._data_dir

    @property
    def log_path(self) -> Path:
        """File with the broker's output."""
        return self.data_dir / "broker.log"

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the broker and return when it serves requests; does nothing if it runs.

        Args:
            timeout_s: Longest time until it is ready, seconds, without the downloads and
                preparations of the first start ever.

        Raises:
            DevBrokerError: It cannot be fetched, a port is taken, or it died or was not ready in
                time; the message has the last lines of its log.
        """
        if self.is_running():
            return
        home = install(self.version)
        java = java_of(self.version)
        if self._class_options is None:
            self._class_options = options_of_broker(self.version, home, java)
        self._prepare(home)
        self._check_ports()
        deadline = time.monotonic() + timeout_s
        outcome = StartResult.STUCK
        while outcome is StartResult.STUCK and time.monotonic() < deadline:
            log_from = self.log_path.stat().st_size if self.log_path.exists() else 0
            outcome = self._launch(home, java, log_from, deadline)
        if outcome is not StartResult.READY:
            raise start_error("The broker", outcome, timeout_s, self.log_path, log_from)

    def _launch(self, home: Path, java: Path, log_from: int, deadline: float) -> StartResult:
        """Start the process and wait; kill it again unless it becomes ready."""
        process = BrokerProcess(
            self._command(home, java),
            self.log_path,
            remove_if_orphaned=self.data_dir if self._temporary else None,
        )
        outcome = StartResult.LATE
        try:
            outcome = wait_until_ready(
                self.connection,
                returncode=process.returncode,
                log=LogWatch(self.log_path, log_from),
                deadline=deadline,
            )
        finally:
            if outcome is StartResult.READY:
                self._process = process
                if self._detached:
                    process.let_go()
            else:
                process.kill()
        return outcome

    def restart(self, timeout_s: float = 60.0) -> None:
        """Start again with the same ports and data; stops a running broker first.

        Args:
            timeout_s: Longest time until it is ready, seconds.

        Raises:
            DevBrokerError: As for :meth:`start`.
        """
        self.stop()
        self.start(timeout_s)

    def wipe(self) -> None:
        """Delete the data of the stopped broker; ports and directory stay.

        Raises:
            DevBrokerError: It runs.
        """
        if self.is_running():
            raise DevBrokerError("The broker is running.", "Stop it before you delete its data.")
        for name in ("metadata", "bookkeeper"):
            shutil.rmtree(self.data_dir / name, ignore_errors=True)

    def close(self) -> None:
        """Stop the broker, remove a temporary data directory, and free the ports."""
        for port in (self._port, self._admin_port, self._bookie_port):
            if port is not None:
                give_back(port)
        if self._temporary:
            self.kill()
            if self._data_dir is not None:
                shutil.rmtree(self._data_dir, ignore_errors=True)
                self._data_dir = None
                self._bookie_port = None
        else:
            self.stop()

    def _prepare(self, home: Path) -> None:
        """Write the configuration; the bookie's port is part of its data's identity and stays."""
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            state = self.data_dir / _STATE
            known = json.loads(state.read_text()) if state.exists() else {}
            newest = self._newest(known.get("pulsar", self.version))
            if self._bookie_port is None and known:
                self._bookie_port = int(known["bookie_port"])
            if self._bookie_port is None:
                self._bookie_port = free_port({self.port, self.admin_port})
            known = {"bookie_port": self._bookie_port, "pulsar": newest}
            state.write_text(json.dumps(known) + "\n")
            text = template(home, "standalone.conf")
            self._config_path.write_text(render_config(text, self._all_settings()))
        except (OSError, ValueError, KeyError) as exc:
            raise DevBrokerError(
                f"The data directory {self.data_dir} cannot be used: {first_line(exc)}.",
                "Use another one.",
            ) from exc

    def _newest(self, written_by: str) -> str:
        """Return the newest release that has written the data directory, including this release."""
        ours, theirs = Version.of(self.version), Version.of(written_by)
        if ours is None or theirs is None or theirs <= ours:
            return self.version
        if theirs.major > ours.major:
            raise DevBrokerError(
                f"Pulsar {written_by} has written the data directory {self.data_dir}, which "
                f"Pulsar {self.version} cannot read.",
                f"Start Pulsar {written_by}, or use another directory.",
            )
        return written_by

    @property
    def _config_path(self) -> Path:
        return self.data_dir / "standalone.conf"

    def _all_settings(self) -> dict[str, str]:
        return {
            **DEFAULT_SETTINGS,
            "bindAddress": LOOPBACK,
            "advertisedAddress": LOOPBACK,
            # The bookie reads this file too. Without an interface it listens on all addresses, and
            # it takes the given port only if ephemeral ports are allowed.
            "listeningInterface": loopback_interface(),
            "allowEphemeralPorts": "true",
            "brokerServicePort": str(self.port),
            "webServicePort": str(self.admin_port),
            "narExtractionDirectory": str(self.data_dir / "nar"),
            **(tls_settings(self.authority, self.port, self.admin_port) if self._tls else {}),
            **(token_settings(self.signer, tls=self._tls) if self._tokens else {}),
            **self._settings,
        }

    def _check_ports(self) -> None:
        for port in (self.port, self.admin_port, self._bookie_port):
            if port is not None and not port_is_free(port):
                raise DevBrokerError(
                    f"Port {port} is in use by another process.",
                    "End that process, or use other ports.",
                    port=port,
                )

    def _command(self, home: Path, java: Path) -> list[str]:
        data = self.data_dir
        options = [f"-Dpulsar.config.file={self._config_path}", *(self._class_options or ())]
        return [
            *jvm_command(home, java, memory=_MEMORY, options=options, optimised=self._optimised),
            *("org.apache.pulsar.PulsarStandaloneStarter", "-nfw", "-nss"),
            *("--config", str(self._config_path)),
            *("--metadata-dir", str(data / "metadata")),
            *("--zookeeper-dir", str(data / "zookeeper")),
            *("--bookkeeper-dir", str(data / "bookkeeper")),
            *("--bookkeeper-port", str(self._bookie_port)),
        ]


def options_of_broker(version: str, home: Path, java: Path) -> list[str]:
    """Return the options with which a JVM maps the classes of its broker; none if it cannot.

    Args:
        version: Pulsar version.
        home: Folder with its jars.
        java: Folder of the Java.
    """

    def record(options: Sequence[str]) -> None:
        """Run a broker whose JVM writes the archive of its classes at its end."""
        broker = DevBroker(version)
        broker._class_options = options
        with broker:
            broker.stop(_ARCHIVE_TIMEOUT_S)

    return class_options(home, java, record)


# -- The configuration file of a development broker ------------------------------------------------

_SETTING = re.compile(r"\s*([A-Za-z][\w.]*)\s*=")

DEFAULT_SETTINGS: Mapping[str, str] = {
    # By default a topic without a subscription is deleted after a minute, with its messages.
    "brokerDeleteInactiveTopicsEnabled": "false",
    "brokerShutdownTimeoutMs": "5000",
    "webSocketServiceEnabled": "false",
}
"""Differences from Pulsar's own standalone settings, besides addresses and ports."""


def render_config(template: str, settings: Mapping[str, str]) -> str:
    """Return a broker's configuration: the template with some settings replaced or added.

    Args:
        template: Text of Pulsar's ``standalone.conf``.
        settings: Names and values; lines of the template with one of these names are removed.

    Raises:
        ConfigError: A name or a value is not valid in the file.
    """
    for name, value in settings.items():
        if not re.fullmatch(r"[A-Za-z][\w.]*", name) or "\n" in value or "\r" in value:
            raise ConfigError(
                f"Broker setting {name!r}={value!r} is not valid. A name has letters, digits, "
                "'_' and '.', and a value has one line."
            )
    kept = [
        line
        for line in template.splitlines()
        if not (match := _SETTING.match(line)) or match[1] not in settings
    ]
    added = [f"{name}={value}" for name, value in settings.items()]
    return "\n".join([*kept, "", "# Set by keyshard", *added, ""])
