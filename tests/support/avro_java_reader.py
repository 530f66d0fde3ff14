"""Avro's Java reader, which reads values by two versions of their schema."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path

from tests.support.avro_versions import Answer, Case
from tests.support.java_values import run

_SOURCE = """
import java.io.*;
import java.nio.charset.StandardCharsets;
import java.util.*;
import com.fasterxml.jackson.databind.*;
import com.fasterxml.jackson.databind.node.*;
import org.apache.avro.*;
import org.apache.avro.generic.*;
import org.apache.avro.io.*;
public class AvroVersions {
  static final ObjectMapper JSON = new ObjectMapper();
  static int counter;
  static int choices(Schema s) {
    int most = 1;
    switch (s.getType()) {
      case UNION:
        most = s.getTypes().size();
        for (Schema one : s.getTypes()) most = Math.max(most, choices(one));
        return most;
      case RECORD:
        for (Schema.Field one : s.getFields()) most = Math.max(most, choices(one.schema()));
        return most;
      case ARRAY: return choices(s.getElementType());
      case MAP: return choices(s.getValueType());
      case ENUM: return s.getEnumSymbols().size();
      default: return most;
    }
  }
  /** The value with a number, which chooses types and symbols. */
  static Object make(Schema s, int number) {
    switch (s.getType()) {
      case UNION: return make(s.getTypes().get(number % s.getTypes().size()), number);
      case RECORD:
        GenericData.Record record = new GenericData.Record(s);
        for (Schema.Field one : s.getFields()) record.put(one.pos(), make(one.schema(), number));
        return record;
      case ARRAY:
        Object first = make(s.getElementType(), number);
        return Arrays.asList(first, make(s.getElementType(), number + 1));
      case MAP: return Collections.singletonMap("k", make(s.getValueType(), number));
      case ENUM:
        List<String> symbols = s.getEnumSymbols();
        return new GenericData.EnumSymbol(s, symbols.get(number % symbols.size()));
      case FIXED:
        byte[] bytes = new byte[s.getFixedSize()];
        Arrays.fill(bytes, (byte) ++counter);
        return new GenericData.Fixed(s, bytes);
      case STRING: return "s" + ++counter;
      case INT: return ++counter;
      case LONG: return (long) ++counter;
      case DOUBLE: return ++counter + 0.5;
      default: return null;
    }
  }
  static JsonNode told(Schema s, Object v) {
    JsonNodeFactory make = JSON.getNodeFactory();
    switch (s.getType()) {
      case UNION:
        int at = GenericData.get().resolveUnion(s, v), before = 0, others = 0;
        for (int i = 0; i < s.getTypes().size(); i++) {
          if (s.getTypes().get(i).getType() == Schema.Type.NULL) continue;
          if (i < at) before++;
          others++;
        }
        JsonNode found = told(s.getTypes().get(at), v);
        if (others < 2 || v == null) return found;
        return make.objectNode().set("member" + before, found);
      case RECORD:
        ObjectNode record = make.objectNode();
        for (Schema.Field one : s.getFields())
          record.set(one.name(), told(one.schema(), ((IndexedRecord) v).get(one.pos())));
        return record;
      case ARRAY:
        ArrayNode items = make.arrayNode();
        for (Object one : (Collection<?>) v) items.add(told(s.getElementType(), one));
        return items;
      case MAP:
        ObjectNode map = make.objectNode();
        for (Map.Entry<?, ?> one : ((Map<?, ?>) v).entrySet())
          map.set(one.getKey().toString(), told(s.getValueType(), one.getValue()));
        return map;
      case FIXED:
        return make.textNode(new String(((GenericFixed) v).bytes(), StandardCharsets.ISO_8859_1));
      case ENUM: case STRING: return make.textNode(v.toString());
      default: return JSON.valueToTree(v);
    }
  }
  public static void main(String[] none) throws Exception {
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
    PrintStream out = new PrintStream(System.out, true, "UTF-8");
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      JsonNode both = JSON.readTree(line);
      Schema written = new Schema.Parser().parse(both.get(0).toString());
      Schema wanted = new Schema.Parser().parse(both.get(1).toString());
      counter = 0;
      ArrayNode answers = JSON.createArrayNode();
      for (int number = 0; number < Math.min(4, choices(written)); number++) {
        ByteArrayOutputStream into = new ByteArrayOutputStream();
        BinaryEncoder encoder = EncoderFactory.get().binaryEncoder(into, null);
        new GenericDatumWriter<Object>(written).write(make(written, number), encoder);
        encoder.flush();
        byte[] value = into.toByteArray();
        JsonNode found;
        try {
          found = told(wanted, new GenericDatumReader<Object>(written, wanted)
              .read(null, DecoderFactory.get().binaryDecoder(value, null)));
        } catch (RuntimeException refused) { found = JSON.getNodeFactory().textNode("refused"); }
        answers.addArray().add(Base64.getEncoder().encodeToString(value)).add(found);
      }
      out.println(JSON.writeValueAsString(answers));
    }
    System.exit(0);
  }
}
"""


def ask(folder: Path, cases: Sequence[Case]) -> list[Answer]:
    """Let Avro's Java reader read values of each case.

    Args:
        folder: For the program.
        cases: Versions of schemas.

    Returns:
        Its answers, up to four for a case.
    """
    given = "".join(json.dumps([one.written, one.wanted]) + "\n" for one in cases)
    lines = run(folder, "AvroVersions", _SOURCE, given).decode().splitlines()
    return [
        Answer(case.name, b64decode(value), found)
        for case, line in zip(cases, lines, strict=True)
        for value, found in json.loads(line)
    ]
