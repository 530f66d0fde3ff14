"""Java classes with a field of each type, and what Pulsar's Java client writes for them as JSON.

``java_values.jsonl`` has the schemas and values of the client. A test on a real client, which needs
a Java with a compiler, holds the file against it.
"""

from __future__ import annotations

import json
import subprocess
from base64 import b64decode
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from keyshard.testing.devbroker import install, java_home
from tests.support.deadlines import deadline
from tests.support.tested_pulsar import JAVA_CLIENT

WRITTEN = Path(__file__).with_suffix(".jsonl")
"""Type, schema and value in each line."""
_UTC = timezone.utc
_INSTANT, _LOCAL = pa.timestamp("us", tz="UTC"), pa.timestamp("us")
_CLOCK = datetime(2026, 11, 27, 13, 5, 0, 123456, _UTC)
_MILLIS = datetime(2023, 11, 14, 22, 13, 20, 123000, _UTC)


class Case(NamedTuple):
    """A type of Java, a value of it, and the column that a user expects."""

    java: str
    expression: str
    column: pa.DataType
    value: Any
    boxed: str = ""
    """The type inside collections, if it is another one."""


CASES = (
    Case("boolean", "true", pa.bool_(), value=True, boxed="Boolean"),
    Case("byte", "(byte) -5", pa.int32(), -5, "Byte"),
    Case("short", "(short) -5", pa.int32(), -5, "Short"),
    Case("int", "-5", pa.int32(), -5, "Integer"),
    Case("long", "-5L", pa.int64(), -5, "Long"),
    Case("float", "1.5f", pa.float32(), 1.5, "Float"),
    Case("double", "Double.POSITIVE_INFINITY", pa.float64(), float("inf"), "Double"),
    Case("char", "'x'", pa.string(), "x", "Character"),
    Case("String", '"a\\"ä"', pa.string(), 'a"ä'),
    Case("CharSequence", '"abc"', pa.string(), "abc"),
    Case("byte[]", "new byte[] {1, 2}", pa.binary(), b"\x01\x02"),
    Case("char[]", "new char[] {'a', 'b'}", pa.string(), "ab"),
    Case("short[]", "new short[] {1, 2}", pa.list_(pa.int32()), [1, 2]),
    Case("Byte[]", "new Byte[] {1, 2}", pa.list_(pa.int32()), [1, 2]),
    Case("Color", "Color.GREEN", pa.string(), "GREEN"),
    Case("Inner", "new Inner()", pa.struct([("at", _INSTANT), ("n", pa.int32())]),
         {"at": _MILLIS, "n": 3}),
    Case("Object", 'Collections.singletonMap("a", 1)', pa.string(), '{"a":1}'),
    Case("Number", "4.5", pa.string(), "4.5"),
    Case("Class", "String.class", pa.string(), "java.lang.String"),
    Case("java.nio.ByteBuffer", "java.nio.ByteBuffer.wrap(new byte[] {1, 2})", pa.binary(),
         b"\x01\x02"),
    Case("java.math.BigDecimal", 'new java.math.BigDecimal("12.50")', pa.string(), "12.50"),
    Case("java.math.BigInteger", 'new java.math.BigInteger("123456789012345678901234567890")',
         pa.string(), "123456789012345678901234567890"),
    Case("java.time.Instant", "Instant.ofEpochSecond(1700000000L, 123456789)", _INSTANT,
         _MILLIS.replace(microsecond=123456)),
    Case("java.time.LocalDate", "LocalDate.of(2026, 11, 27)", pa.date32(), date(2026, 11, 27)),
    Case("java.time.LocalTime", "LocalTime.of(13, 5, 0, 123456789)", pa.time64("us"),
         time(13, 5, 0, 123456)),
    Case("java.time.LocalDateTime", "LocalDateTime.of(2026, 11, 27, 13, 5, 0, 123456789)", _LOCAL,
         _CLOCK.replace(tzinfo=None)),
    Case("java.time.ZonedDateTime", "LocalDateTime.of(2026, 11, 27, 13, 5, 0, 123456789)"
         '.atZone(ZoneId.of("Europe/Berlin"))', _INSTANT,
         _CLOCK - timedelta(hours=1)),
    Case("java.time.OffsetDateTime", "LocalDateTime.of(2026, 11, 27, 13, 5, 0, 123456789)"
         ".atOffset(ZoneOffset.ofHours(2))", _INSTANT,
         _CLOCK - timedelta(hours=2)),
    Case("java.time.OffsetTime", "OffsetTime.of(13, 5, 0, 120000000, ZoneOffset.ofHours(2))",
         pa.string(), "13:05:00.12+02:00"),
    Case("java.time.Duration", "Duration.ofMillis(-90123)", pa.duration("us"),
         timedelta(milliseconds=-90123)),
    Case("java.time.Period", "Period.of(1, 2, 3)", pa.string(), "P1Y2M3D"),
    Case("java.time.Year", "Year.of(2026)", pa.int32(), 2026),
    Case("java.time.YearMonth", "YearMonth.of(2026, 1)", pa.string(), "2026-01"),
    Case("java.time.MonthDay", "MonthDay.of(11, 27)", pa.string(), "--11-27"),
    Case("java.time.DayOfWeek", "DayOfWeek.FRIDAY", pa.string(), "FRIDAY"),
    Case("java.time.ZoneId", 'ZoneId.of("Europe/Berlin")', pa.string(), "Europe/Berlin"),
    Case("java.time.ZoneOffset", "ZoneOffset.ofHours(2)", pa.string(), "+02:00"),
    Case("java.util.Date", "new Date(1700000000123L)", _INSTANT, _MILLIS),
    Case("java.sql.Timestamp", "new java.sql.Timestamp(1700000000123L)", _INSTANT, _MILLIS),
    Case("java.sql.Date", "new java.sql.Date(1700000000123L)", _INSTANT, _MILLIS),
    Case("java.sql.Time", "new java.sql.Time(80000000L)", pa.time64("us"), time(22, 13, 20)),
    Case("java.util.Calendar", "new Calendar.Builder().setInstant(1700000000123L).build()",
         _INSTANT, _MILLIS),
    Case("java.util.UUID", "new UUID(1, 2)", pa.string(), "00000000-0000-0001-0000-000000000002"),
    Case("java.util.Locale", "Locale.GERMANY", pa.string(), "de_DE"),
    Case("java.util.Currency", 'Currency.getInstance("EUR")', pa.string(), "EUR"),
    Case("java.util.TimeZone", 'TimeZone.getTimeZone("Europe/Berlin")', pa.string(),
         "Europe/Berlin"),
    Case("java.util.regex.Pattern", 'java.util.regex.Pattern.compile("a+")', pa.string(), "a+"),
    Case("java.util.Optional", 'Optional.of("a")', pa.string(), '"a"'),
    Case("java.util.OptionalInt", "OptionalInt.of(3)", pa.int32(), 3),
    Case("java.util.OptionalLong", "OptionalLong.of(3)", pa.int64(), 3),
    Case("java.util.OptionalDouble", "OptionalDouble.of(0.5)", pa.float64(), 0.5),
    Case("java.util.BitSet", "BitSet.valueOf(new long[] {5})", pa.string(), '{"empty":false}'),
    Case("java.util.concurrent.atomic.AtomicBoolean",
         "new java.util.concurrent.atomic.AtomicBoolean(true)", pa.bool_(), value=True),
    Case("java.util.concurrent.atomic.AtomicInteger",
         "new java.util.concurrent.atomic.AtomicInteger(4)", pa.int32(), 4),
    Case("java.util.concurrent.atomic.AtomicLong",
         "new java.util.concurrent.atomic.AtomicLong(4)", pa.int64(), 4),
    Case("java.net.URI", 'java.net.URI.create("http://a/b")', pa.string(), "http://a/b"),
    Case("java.io.File", 'new java.io.File("/a/b")', pa.string(), "/a/b"),
    Case("java.net.InetAddress", "java.net.InetAddress.getLoopbackAddress()", pa.string(),
         "localhost"),
)  # fmt: skip

_SOURCE = """
import java.time.*;
import java.util.*;
import org.apache.pulsar.client.api.Schema;
public class JavaValues {
  public enum Color { RED, GREEN }
  public static class Inner {
    public int n = 3;
    public Instant at = Instant.ofEpochMilli(1700000000123L);
  }
  %s
  static <T> void write(Class<T> kind) throws Exception {
    Schema<T> schema = Schema.JSON(kind);
    byte[] value = schema.encode(kind.getDeclaredConstructor().newInstance());
    byte[] again = schema.encode(schema.decode(value));
    for (byte[] one : List.of(schema.getSchemaInfo().getSchema(), value, again))
      System.out.println(Base64.getEncoder().encodeToString(one));
  }
  public static void main(String[] none) throws Exception {
    %s
    System.exit(0);
  }
}
"""
_CLASS = """
  public static class %(name)s {
    public static class Within { public %(java)s v = %(expression)s; }
    public %(java)s v = %(expression)s;
    public %(boxed)s none;
    public List<%(boxed)s> list = Arrays.asList(v, null);
    public Map<String, %(boxed)s> map = Collections.singletonMap("k", v);
    public Map<Integer, %(boxed)s> numbered = Collections.singletonMap(7, v);
    public Map<Integer, %(boxed)s> numberedAgain = numbered;
    public Map<Color, List<%(boxed)s>> colored = Collections.singletonMap(Color.RED, list);
    public Within within = new Within();
    public List<Within> nested = Collections.singletonList(new Within());
    public int last = 1;
  }
"""


def source() -> str:
    """Return a program that writes an object of a class for each case."""
    classes = [
        _CLASS
        % {
            "name": f"Of{number}", "java": one.java, "expression": one.expression,
            "boxed": one.boxed or one.java,
        }
        for number, one in enumerate(CASES)
    ]  # fmt: skip
    calls = [f"write(Of{number}.class);" for number in range(len(CASES))]
    return _SOURCE % ("".join(classes), "\n    ".join(calls))


def run(folder: Path, name: str, program: str, given: str = "") -> bytes:
    """Run a Java program with Pulsar's client, in UTF-8 and UTC.

    Args:
        folder: For the program.
        name: Its class.
        program: Its source.
        given: Its input.

    Returns:
        Its output.
    """
    file = folder / f"{name}.java"
    file.write_text(program, encoding="utf-8")
    jars = str(install(JAVA_CLIENT) / "lib" / "*")
    java = str(java_home() / "bin" / "java")
    ended = subprocess.run(
        [java, "-cp", jars, "-Dfile.encoding=UTF-8", "-Duser.timezone=UTC", str(file)],
        capture_output=True, timeout=deadline(100), check=True, input=given.encode(),
    )  # fmt: skip
    return ended.stdout


def write(folder: Path) -> dict[str, list[str]]:
    """Let the client write an object of each class, read it, and write what it read.

    Args:
        folder: For the program.

    Returns:
        Schema, value and second value, by type.
    """
    written = run(folder, "JavaValues", source())
    texts = [b64decode(line).decode() for line in written.split()]
    return {one.java: texts[3 * at : 3 * at + 3] for at, one in enumerate(CASES)}


def expected(case: Case) -> dict[str, Any]:
    """Return the row of a class."""
    value = case.value
    return {
        "v": value, "none": None, "list": [value, None], "map": {"k": value},
        "numbered": {7: value}, "numberedAgain": {7: value}, "colored": {"RED": [value, None]},
        "within": {"v": value}, "nested": [{"v": value}], "last": 1,
    }  # fmt: skip


def column_types(case: Case) -> dict[str, pa.DataType]:
    """Return the columns of a class."""
    kind = case.column
    within = pa.struct([("v", kind)])
    return {
        "v": kind, "none": kind, "list": pa.list_(kind), "map": pa.map_(pa.string(), kind),
        "numbered": pa.map_(pa.int32(), kind), "numberedAgain": pa.map_(pa.int32(), kind),
        "colored": pa.map_(pa.string(), pa.list_(kind)), "within": within,
        "nested": pa.list_(within), "last": pa.int32(),
    }  # fmt: skip


def load() -> dict[str, tuple[str, str]]:
    """Return schema and value by type, as they are kept."""
    lines = WRITTEN.read_text(encoding="utf-8").splitlines()
    return {java: (json.dumps(schema), value) for java, schema, value in map(json.loads, lines)}


def keep(written: dict[str, list[str]]) -> None:
    """Keep what :func:`write` returned."""
    lines = [
        json.dumps([java, json.loads(schema), value], ensure_ascii=False, separators=(",", ":"))
        for java, (schema, value, _) in written.items()
    ]
    WRITTEN.write_text("\n".join(lines) + "\n", encoding="utf-8")
