"""Resolves the types of a written Avro schema to the reader's types, as Avro's Java reader does.

The specification compares the unqualified names of records, enumerations and fixed types. Avro's
Java reader, which Pulsar's clients and its brokers use, compares less of a record: outside unions
nothing, so that a renamed class is read. Inside unions it prefers equal names, and then takes equal
shapes. docs/adr/0046 has the rules.

fastavro follows the specification. So each written type gets the name of the reader's type that it
resolves to, before fastavro gets the schema. A type that resolves to none gets an unused name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from keyshard.columns.avro_unions import PREFIX, is_member, kind_of, record_of, without_member

_NAMED = ("record", "error", "enum", "fixed")
PROMOTED_NUMBERS = {
    "int": ("long", "float", "double"), "long": ("float", "double"), "float": ("double",),
}  # fmt: skip
_PROMOTED = {**PROMOTED_NUMBERS, "string": ("bytes",), "bytes": ("string",)}
_SYMBOLS_MAX = 1_000_000
"""Most symbols of all enumerations of a version, because a type is written out at each use."""
_UNREAD = f"{PREFIX}none"
"""Name of written types that resolve to none of the reader."""


def written_for(written: Any, wanted: Any) -> Any:
    """Return a written schema with the names of the reader's types that its types resolve to.

    Args:
        written: The writer's :attr:`~keyshard.columns.avro_types.AvroType.schema`.
        wanted: The reader's :attr:`~keyshard.columns.avro_types.AvroType.schema`.

    Raises:
        ValueError: The written schema has too many symbols.
    """
    return _Resolution(written, wanted).renamed(written, wanted)


def without_aliases(schema: Any) -> Any:
    """Return a schema without the aliases of its types and fields."""
    if isinstance(schema, list):
        return [without_aliases(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: one for key, one in schema.items() if key != "aliases"}
    for within in ("type", "items", "values"):
        if within in found:
            found[within] = without_aliases(found[within])
    if "fields" in found:
        found["fields"] = [without_aliases(one) for one in found["fields"]]
    return found


class _Resolution:
    def __init__(self, written: Any, wanted: Any) -> None:
        self._written = dict(_named(written))
        self._wanted = dict(_named(wanted))
        self._names = {
            alias: name for name, one in self._wanted.items() for alias in _full_aliases(one)
        }
        """Names of wanted types by alias; the last type with an alias has it."""
        self._matching: dict[tuple[int, int], bool] = {}
        self._made = 0
        self._symbols = 0

    # -- The written schema with other names ------------------------------------------------------

    def renamed(self, written: Any, wanted: Any) -> Any:
        """Return a written type with the names of a wanted type; ``None``: the reader skips it."""
        written, wanted = self._written_type(written), self._wanted_type(wanted)
        if not isinstance(written, list):
            return self._branch(written, wanted, None)
        by_place = isinstance(wanted, list) and self._equivalent(written, wanted)
        return [
            self._branch(
                self._written_type(without_member(one)), wanted, place if by_place else None
            )
            for place, one in enumerate(written)
        ]

    def _branch(self, written: Any, wanted: Any, place: int | None) -> Any:
        """Rename a written type that is no union, such as a branch of a union.

        Args:
            written: The written type.
            wanted: The reader's type; ``None`` if the reader skips the value.
            place: Index of the branch in the wanted union, if that is known.

        Returns:
            The renamed type; a record of one field if the branches of the wanted union are records
            of one field.
        """
        if not isinstance(wanted, list):
            return self._single(written, wanted)
        if place is None:
            place = self._place(written, wanted)
        found = None if place is None else wanted[place]
        if written == "null":
            return written
        if not any(map(is_member, wanted)):
            return self._single(written, self._wanted_type(found))
        if found is None:
            return record_of(_UNREAD, self._namespace(), "none", self.renamed(written, None))
        (field,) = found["fields"]
        kind = self.renamed(written, field["type"])
        return record_of(found["name"], self._namespace(), field["name"], kind)

    def _single(self, written: Any, wanted: Any) -> Any:
        if not isinstance(written, dict):
            return written
        kind = kind_of(written)
        alike = isinstance(wanted, dict) and kind_of(wanted) == kind
        if kind in ("array", "map"):
            within = "items" if kind == "array" else "values"
            item = wanted[within] if alike else None
            return written | {within: self.renamed(written[within], item)}
        if kind not in _NAMED:
            return written
        self._symbols += len(written.get("symbols", ()))
        if self._symbols > _SYMBOLS_MAX:
            raise ValueError(f"more than {_SYMBOLS_MAX} symbols, wherever they are used")
        same = alike and (kind == "record" or self._is_called(written, wanted))
        made = without_aliases({key: one for key, one in written.items() if key != "fields"}) | {
            "name": wanted["name"] if same else _UNREAD,
            "namespace": self._namespace(),
        }
        if kind == "record":
            fields = self._fields(written, wanted) if same else {}
            made["fields"] = [
                self._field(one, fields.get(one["name"])) for one in written["fields"]
            ]
        return made

    def _field(self, written: dict[str, Any], wanted: dict[str, Any] | None) -> dict[str, Any]:
        name, kind = (written["name"], None) if wanted is None else (wanted["name"], wanted["type"])
        return {"name": name, "type": self.renamed(written["type"], kind)}

    def _namespace(self) -> str:
        """Return a new namespace: a type is written out at each use, and names must be unique."""
        self._made += 1
        return f"w{self._made}"

    def _written_type(self, kind: Any) -> Any:
        return _type_in(self._written, kind)

    def _wanted_type(self, kind: Any) -> Any:
        return _type_in(self._wanted, kind)

    # -- The rules --------------------------------------------------------------------------------

    def _name(self, written: dict[str, Any]) -> str:
        """Return the full name of a written type, or of the wanted type that has it as an alias."""
        name = _full_name(written)
        return self._names.get(name, name)

    def _is_called(self, written: dict[str, Any], wanted: dict[str, Any]) -> bool:
        """Whether an enumeration or a fixed type has the name, or an alias, of a wanted type."""
        if _short(self._name(written)) == wanted["name"]:
            return True
        names = {written["name"], _full_name(written)}
        return not names.isdisjoint(wanted.get("aliases", ()))

    def _fields(
        self, written: dict[str, Any], wanted: dict[str, Any]
    ) -> Mapping[str, dict[str, Any]]:
        """Return the wanted fields that the fields of a written record become, by written name."""
        by_name = {one["name"]: one for one in wanted["fields"]}
        by_alias = {alias: one for one in wanted["fields"] for alias in one.get("aliases", ())}
        names = [one["name"] for one in written["fields"]]
        if self._name(written) == _full_name(wanted):
            found = {
                name: one for name in names if (one := by_alias.get(name) or by_name.get(name))
            }
            if len({one["name"] for one in found.values()}) == len(found):
                return found
        found = {name: by_name[name] for name in names if name in by_name}
        for name in names:
            one = by_alias.get(name)
            if name not in found and one is not None and one["name"] not in names:
                found[name] = one
        return found

    def _place(self, written: Any, wanted: list[Any]) -> int | None:
        """Return the index of the wanted branch for a written type; ``None`` if there is none."""
        kind = kind_of(written)
        types = [self._wanted_type(without_member(one)) for one in wanted]
        same = [place for place, one in enumerate(types) if kind_of(one) == kind]
        found: Iterable[int] = same
        if kind in _NAMED:
            found = self._places_of_named(written, types, same)
        wider = (
            place for place, one in enumerate(types) if kind_of(one) in _PROMOTED.get(kind, ())
        )
        return next(chain(found, wider), None)

    def _places_of_named(
        self, written: dict[str, Any], types: list[Any], same: list[int]
    ) -> Iterator[int]:
        """Yield the indices of wanted types that a written type can become, the best one first."""
        name = self._name(written)
        yield from (place for place in same if _full_name(types[place]) == name)
        if written["type"] != "record":
            yield from (place for place in same if self._is_called(written, types[place]))
            return
        called = [place for place in same if types[place]["name"] == _short(name)]
        for places in called[::-1], same:
            yield from (place for place in places if self._matches(written, types[place]))

    def _matches(self, written: dict[str, Any], wanted: dict[str, Any]) -> bool:
        """Whether a written record has the shape of another, looking at its own fields only."""
        key = id(written), id(wanted)
        found = self._matching.get(key)
        if found is None:
            fields = self._fields(written, wanted)
            found = self._matching[key] = not self._lacks(fields, wanted) and not any(
                self._is_refused(one["type"], fields[one["name"]]["type"])
                for one in written["fields"]
                if one["name"] in fields
            )
        return found

    def _lacks(self, fields: Mapping[str, dict[str, Any]], wanted: dict[str, Any]) -> bool:
        """Whether a wanted field without a default is missing from the resolved fields."""
        there = {one["name"] for one in fields.values()}
        return any("default" not in one and one["name"] not in there for one in wanted["fields"])

    def _is_refused(self, written: Any, wanted: Any) -> bool:
        """Whether no value of a written type becomes one of another, as far as these types say."""
        written, wanted = self._written_type(written), self._wanted_type(wanted)
        if isinstance(written, list):
            return False
        if isinstance(wanted, list):
            return self._place(written, wanted) is None
        kind = kind_of(written)
        if kind != kind_of(wanted):
            return kind_of(wanted) not in _PROMOTED.get(kind, ())
        if kind == "record":
            return self._lacks(self._fields(written, wanted), wanted)
        named = kind in _NAMED
        return named and not (
            self._is_called(written, wanted) and written.get("size") == wanted.get("size")
        )

    def _equivalent(self, written: Any, wanted: Any) -> bool:
        """Whether two types are alike but for namespaces: then unions are compared by place."""
        written = without_member(self._written_type(written))
        wanted = without_member(self._wanted_type(wanted))
        written, wanted = self._written_type(written), self._wanted_type(wanted)
        if isinstance(written, list) or isinstance(wanted, list):
            return (
                isinstance(written, list) and isinstance(wanted, list)
                and len(written) == len(wanted)
                and all(map(self._equivalent, written, wanted))
            )  # fmt: skip
        kind = kind_of(written)
        if kind != kind_of(wanted):
            return False
        if kind in ("array", "map"):
            within = "items" if kind == "array" else "values"
            return self._equivalent(written[within], wanted[within])
        return kind not in _NAMED or self._equivalent_named(written, wanted)

    def _equivalent_named(self, written: dict[str, Any], wanted: dict[str, Any]) -> bool:
        if _short(self._name(written)) != wanted["name"]:
            return False
        if written["type"] != "record":
            return all(written.get(one) == wanted.get(one) for one in ("symbols", "size"))
        fields = self._fields(written, wanted)
        return len(written["fields"]) == len(wanted["fields"]) and all(
            one["name"] in fields
            and fields[one["name"]]["name"] == other["name"]
            and self._equivalent(one["type"], other["type"])
            for one, other in zip(written["fields"], wanted["fields"], strict=True)
        )


def _type_in(named: Mapping[str, Any], kind: Any) -> Any:
    return named.get(kind, kind) if isinstance(kind, str) else kind


def _full_name(kind: Mapping[str, Any]) -> str:
    return f"{kind['namespace']}.{kind['name']}".lstrip(".")


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _full_aliases(kind: Mapping[str, Any]) -> Iterator[str]:
    """Yield a type's aliases; one without a namespace gets the namespace of the type."""
    for alias in kind.get("aliases", ()):
        space = kind["namespace"]
        yield alias.removeprefix(".") if "." in alias or not space else f"{space}.{alias}"


def _named(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield the named types in a type."""
    if isinstance(kind, list):
        for one in kind:
            yield from _named(one)
    elif isinstance(kind, dict):
        if kind_of(kind) in _NAMED:
            yield _full_name(kind), kind
        for one in kind.get("fields", ()):
            yield from _named(one["type"])
        for within in ("items", "values"):
            if within in kind:
                yield from _named(kind[within])
