"""JSON values in forms that Java's client may or may not read, and what it reads.

``java_forms.jsonl`` has the answers of the client; a test on a real client holds the file against
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tests.support.java_values import run

READ = Path(__file__).with_suffix(".jsonl")
"""Type, schema, and what is read by value, in each line."""
FORMS = {
    "java.time.Instant": (
        '"2026-11-27T13:05:07Z"', '"2026-11-27T13:05:07"', '"2026-11-27 13:05:07Z"',
        '"2026-11-27T13:05:07+01:00"', '"2026-11-27T13:05Z"', '"2026-11-27t13:05:07z"',
        '"2026-11-27T13:05:07.123456789123Z"', '"2026-11-27T13:05:07.1Z"',
        '"2026-11-27T13:05:07.Z"', '"2026-11-27T13:05:07+0100"', '"2026-11-27T13:05:07+01"',
        '"2026-11-27T24:00:00Z"', '"2026-11-27T23:59:60Z"', '"+12026-11-27T13:05:07Z"',
        '"12026-11-27T13:05:07Z"', '"-0001-11-27T13:05:07Z"',
        '"2026-11-27T13:05:07+01:00[Europe/Berlin]"', '"1700000000"', '"1700000000.5"', '""',
        '"2026-11-27"', '"20261127T130507Z"', '" 2026-11-27T13:05:07Z "', '1700000000', '1e3',
        '[1700000000]', '"2026-W01-1T00:00:00Z"', '"+1000000000-12-31T23:59:59.999999999Z"',
        '1700000000.1234567891234', '-1.5', '"2026-11-27T13:05:07+19:00"',
    ),
    "java.time.LocalDate": (
        '[2026,11,27]', '"2026-11-27"', '"20261127"', '"2026-W01-1"', '"2026-11-27T13:05:07"',
        '"2026-11-27T13:05:07Z"', '"2026-11-27T13:05:07+01:00"', '20784', '[2026,1]',
        '[12026,1,1]', '"+12026-01-01"', '["2026","11","27"]', '""', '"2026-1-1"', '[-5,1,1]',
        '"0000-01-01"', '"2026-11-27T13:05"', '1.5', '[2026,"NOVEMBER",5]',
    ),
    "java.time.LocalTime": (
        '[13,5]', '[13,5,7]', '[13,5,7,123456789]', '"13:05"', '"13:05:07"', '"13:05:07.5"',
        '"13:05+02:00"', '"13:05Z"', '"2026-11-27T13:05:07"', '"2026-11-27T13:05:07Z"', '"13"',
        '"24:00"', '5', '[13]', '[24,0]', '"13:05:07,5"', '"1305"', '""',
    ),
    "java.time.LocalDateTime": (
        '[2026,11,27,13,5]', '[2026,11,27,13,5,7,5]', '"2026-11-27T13:05"',
        '"2026-11-27T13:05:07"', '"2026-11-27T13:05:07Z"', '"2026-11-27T13:05:07+01:00"',
        '"2026-11-27 13:05:07"', '"2026-11-27"', '[2026,11,27]', '[2026,11,27,13]', '5', '""',
        '"+12026-11-27T13:05:07"',
    ),
    "java.time.OffsetDateTime": (
        '"2026-11-27T13:05:07Z"', '"2026-11-27T13:05:07+01:00"', '"2026-11-27T13:05:07"',
        '"2026-11-27T13:05+01:00"', '"2026-11-27T13:05:07+0100"',
        '"2026-11-27T13:05:07+01:00[Europe/Berlin]"', '1700000000.5', '"1700000000"',
    ),
    "java.time.ZonedDateTime": (
        '"2026-11-27T13:05:07Z"', '"2026-11-27T13:05:07+01:00"',
        '"2026-11-27T13:05:07+01:00[Europe/Berlin]"', '"2026-11-27T13:05:07Z[UTC]"',
        '"2026-11-27T13:05:07[Europe/Berlin]"', '"2026-11-27T13:05:07"',
        '"2026-11-27T13:05:07+02:00[Europe/Berlin]"',
    ),
    "java.util.Date": (
        '"2026-11-27T13:05:07Z"', '"2026-11-27T13:05:07.123+00:00"', '"2026-11-27T13:05:07+0100"',
        '"2026-11-27T13:05:07+01"', '"2026-11-27"', '"2026-11-27T13:05"', '"2026-11-27T13:05Z"',
        '"2026-11-27T13:05:07"', '"2026-11-27 13:05:07"', '"1700000000123"',
        '"Fri, 27 Nov 2026 13:05:07 GMT"', '1700000000123', '1.5', '""', '[1700000000123]',
        '"2026-11-27T13:05:07.1234567Z"', '"2026-11-27T13:05:07.123456789123Z"',
        '"2026-11-27T13:05:07,5Z"', '"2026-11-27T13:05:07.5"', '"2026-11-27T"',
    ),
    "java.sql.Timestamp": (
        '"2026-11-27T13:05:07Z"', '1700000000123', '"2026-11-27 13:05:07"',
    ),
    "java.sql.Time": (
        '"13:05:07"', '80000000', '"13:05"',
    ),
    "java.sql.Date": (
        '"2026-11-27"', '1700000000123', '"2026-11-27T13:05:07Z"',
    ),
    "java.util.Calendar": (
        '"2026-11-27T13:05:07Z"', '1700000000123', '"2026-11-27"',
    ),
    "java.time.Duration": (
        '"PT1M30.5S"', '"-P1DT1S"', '"P1D"', '"PT-5S"', '"P1DT"', '"PT"', '"P"', '"pt1s"',
        '"PT1.S"', '"PT1.1234567891S"', '"PT.5S"', '5', '5.5', '"5"', '"P1W"', '"+PT1S"',
        '"PT1,5S"', '"PT1H1H"', '""', '[5]', '"P1Y"', '"PT5.5M"', '"PT-0.5S"', '-1.5', '-0.5',
    ),
    "java.time.YearMonth": (
        '[2026,1]', '[2026,99]', '["a","b"]', '"2026-01"', '"2026-1"', '"202601"', '[2026]',
        '[2026,1,1]', '"12026-01"', '"+12026-01"', '5', '""', '[2026,"1"]',
    ),
    "java.time.OffsetTime": (
        '[13,5,"+02:00"]', '[13,5,7,"+02:00"]', '[13,5,7,120000000,"+02:00"]', '"13:05+02:00"',
        '"13:05:07.5Z"', '"13:05"', '"junk"', '[13,5]', '[25,5,"Z"]', '[13,5,"junk"]',
        '[13,5,7,5,"Z"]', '[13,"Z"]', '["Z"]', '5', '[13,5,7,120000000,"+19:00"]', '""',
        '"13:05+02"', '[13,5,"+2"]', '[13,5,"+0200"]',
    ),
    "Character": (
        '"x"', '"xy"', '""', '120', '-1', '70000', '55357', '"\\ud83d"', '"\\ud83d\\ude00"',
        '1.5', '[120]', 'true', '["x"]',
    ),
    "char[]": (
        '"ab"', '["a","b"]', '[97,98]', '["ab"]', '"\\ud83d\\ude00"', '""',
    ),
    "Map<Integer, Integer>": (
        '{"1":5}', '{" 1":5}', '{"1_0":5}', '{"+1":5}', '{"01":5}', '{"1.0":5}',
        '[{"key":1,"value":5}]', '{"":5}', '{"٣":5}', '{"9999999999":5}',
    ),
    "java.math.BigInteger": (
        '5', '"5"', '5.0', '5.7', '1e3', '"5.0"', '" 5 "', '""', '"abc"',
        '"99999999999999999999"', '"1e3"', 'true', '12345678901234567890123',
    ),
    "java.math.BigDecimal": (
        '5', '"5"', '5.0', '1e3', '"1e3"', '" 5 "', '""', '"abc"', '"NaN"', '1E+400', '"0x5"',
        '"1,5"',
    ),
    "java.time.Year": (
        '2026', '"2026"', '2026.5', '"+12026"', '[2026]', '""', '"abc"',
    ),
    "OptionalInt": (
        '5', 'null', '"5"', '5.5', '{"present":true}',
    ),
}  # fmt: skip
"""Values by type. The schema of each is that of a class with one field of the type, ``v``."""
_SOURCE = """
import java.io.*;
import java.time.*;
import java.time.format.DateTimeFormatter;
import java.util.*;
import org.apache.pulsar.client.api.Schema;
public class JavaForms {
  %s
  static Object micros(long seconds, int nanos) {
    try { return Math.addExact(Math.multiplyExact(seconds, 1000000L), (long) (nanos / 1000)); }
    catch (ArithmeticException tooLarge) { return "too large"; }
  }
  static Object plain(Object v) {
    if (v instanceof java.sql.Time) return ((java.sql.Time) v).getTime() * 1000;
    if (v instanceof Date) return ((Date) v).getTime() * 1000;
    if (v instanceof Calendar) return ((Calendar) v).getTimeInMillis() * 1000;
    if (v instanceof Instant) {
      Instant at = (Instant) v;
      return micros(at.getEpochSecond(), at.getNano());
    }
    if (v instanceof OffsetDateTime) return plain(((OffsetDateTime) v).toInstant());
    if (v instanceof ZonedDateTime) return plain(((ZonedDateTime) v).toInstant());
    if (v instanceof LocalDateTime) return plain(((LocalDateTime) v).toInstant(ZoneOffset.UTC));
    if (v instanceof LocalDate) return ((LocalDate) v).toEpochDay();
    if (v instanceof LocalTime) return ((LocalTime) v).toNanoOfDay() / 1000;
    if (v instanceof Duration) return micros(((Duration) v).getSeconds(), ((Duration) v).getNano());
    if (v instanceof OffsetTime)
      return DateTimeFormatter.ISO_OFFSET_TIME.format((OffsetTime) v);
    if (v instanceof char[]) return new String((char[]) v);
    if (v instanceof OptionalInt)
      return ((OptionalInt) v).isPresent() ? ((OptionalInt) v).getAsInt() : null;
    return v;
  }
  public static void main(String[] none) throws Exception {
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
    PrintStream out = new PrintStream(System.out, true, "UTF-8");
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      Class<?> kind =
          Class.forName("JavaForms$" + line.trim(), true, JavaForms.class.getClassLoader());
      Schema<?> schema = Schema.JSON(kind);
      String value = lines.readLine();
      String read;
      try {
        Object made = schema.decode(("{\\"v\\":" + value + "}").getBytes("UTF-8"));
        read = "=" + plain(kind.getField("v").get(made));
      } catch (Exception refused) { read = "refused"; }
      String text = new String(schema.getSchemaInfo().getSchema(), "UTF-8");
      out.println(text.replace("\\n", " ") + "\\t" + read);
    }
    System.exit(0);
  }
}
"""


class Forms(NamedTuple):
    """Values of a type, and the answers of Java's client to them."""

    schema: str
    values: dict[str, str | None]
    """A number in the unit of the column, or a text, by the JSON of the value; ``None``: Java's
    client refuses it."""


def ask(folder: Path) -> dict[str, Forms]:
    """Let the client read each value.

    Args:
        folder: For the program.

    Returns:
        Its answers, by type.
    """
    classes = "\n  ".join(
        f"public static class Of{number} {{ public {java} v; }}"
        for number, java in enumerate(FORMS)
    )
    given = "".join(
        f"Of{number}\n{value}\n" for number, values in enumerate(FORMS.values()) for value in values
    )
    answers = iter(run(folder, "JavaForms", _SOURCE % classes, given).decode().splitlines())
    found = {}
    for java, values in FORMS.items():
        lines = [next(answers).split("\t") for _ in values]
        schema = json.dumps(json.loads(lines[0][0]))
        read = [None if answer == "refused" else answer[1:] for _, answer in lines]
        found[java] = Forms(schema, dict(zip(values, read, strict=True)))
    return found


def load() -> dict[str, Forms]:
    """Return the answers that are kept, by type."""
    lines = READ.read_text(encoding="utf-8").splitlines()
    return {java: Forms(json.dumps(schema), read) for java, schema, read in map(json.loads, lines)}


def keep(found: dict[str, Forms]) -> None:
    """Keep what :func:`ask` returned."""
    lines = [
        json.dumps([java, json.loads(one.schema), one.values], ensure_ascii=False)
        for java, one in found.items()
    ]
    READ.write_text("\n".join(lines) + "\n", encoding="utf-8")
