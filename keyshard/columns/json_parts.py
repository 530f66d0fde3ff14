"""The parts of malformed JSON values that can be read: fields, items and entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import pyarrow as pa

from keyshard.columns.json_forms import Form, entries, formed, numbers_of
from keyshard.columns.json_scalars import Convert
from keyshard.columns.json_types import WRONG, Types, array_of, cast_array

_FAILED: Any = object()
"""In place of a value that cannot be read."""


class Parts:
    """Reads values of one type, each as a whole or, if that fails, part by part.

    All values are read together, level by level. Each level decodes what is below it once more.

    Args:
        types: Makes decoders.
        column: Type of the column.
        form: Form of its values.
    """

    def __init__(self, types: Types, column: pa.DataType, form: Form | None) -> None:
        self._types = types
        self._column = column
        self._form = form or Form()

    def column(self, texts: Sequence[bytes]) -> pa.Array:
        """Return a column of values, with null for each part that cannot be read."""
        try:
            found = self.read(texts)
        except RecursionError:
            found = [None] * len(texts)
        return cast_array(pa.array(found, numbers_of(self._column)), self._column)

    def read(self, texts: Sequence[Any]) -> list[Any]:
        """Return values with numbers for times, and null for each part that cannot be read."""
        found = self._whole(texts)
        failed = [place for place, one in enumerate(found) if one is _FAILED]
        if failed:
            divided = self._divided([texts[place] for place in failed])
            for place, one in zip(failed, divided, strict=True):
                found[place] = one
        return found

    @cached_property
    def _decode(self) -> Callable[[Any], Any]:
        return self._types.decoder(self._types.of(self._column, self._form))

    def _whole(self, texts: Sequence[Any]) -> list[Any]:
        """Return each value that can be read as a whole, and :data:`_FAILED` for the others."""
        read = [_tried(self._value, text) for text in texts]
        places = [place for place, one in enumerate(read) if one is not _FAILED]
        for place, one in zip(
            places, self._fitting([read[place] for place in places]), strict=True
        ):
            read[place] = one
        return read

    def _value(self, text: Any) -> Any:
        value = self._decode(text)
        if self._types.plain is not None:
            value = self._types.plain(value)
        return formed(value, self._form)

    def _fitting(self, values: list[Any]) -> list[Any]:
        """Return values as Arrow returns them, and :data:`_FAILED` for those that it refuses."""
        numbers = numbers_of(self._column)
        found = [_FAILED] * len(values)
        left = [slice(0, len(values))]
        while left:
            part = left.pop()
            try:
                made = array_of(values[part], numbers)
                cast_array(made, self._column)
                found[part] = made.to_pylist()
            except WRONG:
                middle = (part.start + part.stop) // 2
                if middle > part.start:
                    left += [slice(part.start, middle), slice(middle, part.stop)]
        return found

    def _divided(self, texts: Sequence[Any]) -> list[Any]:
        """Return the readable parts of values that cannot be read as a whole."""
        types = pa.types
        if types.is_struct(self._column):
            return self._structs(texts)
        if types.is_map(self._column):
            return self._maps(texts)
        return self._lists(texts) if types.is_list(self._column) else [None] * len(texts)

    @cached_property
    def _fields(self) -> dict[str, Parts]:
        forms = self._form.fields
        return {one.name: Parts(self._types, one.type, forms.get(one.name)) for one in self._column}

    @cached_property
    def _item(self) -> Parts:
        is_map = pa.types.is_map(self._column)
        kind = self._column.item_type if is_map else self._column.value_type
        return Parts(self._types, kind, self._form.item)

    def _structs(self, texts: Sequence[Any]) -> list[Any]:
        fields = [_tried(self._types.objects, text) for text in texts]
        found: list[Any] = [None if one is _FAILED else {} for one in fields]
        for name, part in self._fields.items():
            rows = [row for row, one in enumerate(fields) if one is not _FAILED and name in one]
            for row, value in zip(
                rows, part.read([fields[row][name] for row in rows]), strict=True
            ):
                found[row][name] = value
        return found

    def _maps(self, texts: Sequence[Any]) -> list[Any]:
        objects = [self._entries(text) for text in texts]
        items = iter(self._item.read([item for one in objects for _, item in one or ()]))
        return [None if one is None else [(key, next(items)) for key, _ in one] for one in objects]

    def _entries(self, text: Any) -> list[tuple[Any, Any]] | None:
        """Return the entries of a map, with texts of their values; ``None`` if a key is wrong."""
        found = _tried(self._types.objects, text)
        convert = self._form.key
        if convert is None:
            return None if found is _FAILED else list(found.items())
        if found is _FAILED:
            found = _tried(self._types.pairs, text)
        if found is _FAILED:
            return None
        read = {_tried(partial(self._key, convert), key): one for key, one in entries(found)}
        return None if _FAILED in read else list(read.items())

    def _key(self, convert: Convert, key: Any) -> Any:
        """Return a key as Arrow returns it, from a text or from undecoded JSON."""
        read = key if isinstance(key, str) else self._types.values(key)
        return pa.scalar(convert(read), self._column.key_type).as_py()

    def _lists(self, texts: Sequence[Any]) -> list[Any]:
        lists = [_tried(self._types.lists, text) for text in texts]
        items = iter(self._item.read([item for one in lists if one is not _FAILED for item in one]))
        return [None if one is _FAILED else [next(items) for _ in one] for one in lists]


def _tried(read: Callable[[Any], Any], text: Any) -> Any:
    try:
        return read(text)
    except WRONG:
        return _FAILED
