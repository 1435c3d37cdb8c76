"""Finds keys that a pydantic model would ignore, and says where they were meant to stand."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from cluster.config_errors import join


@dataclass(frozen=True)
class Section:
    """The keys a mapping may hold, with the section below each key that has one."""

    path: str
    """Dotted, with [] for a list: "applications[].args.engine"; "" for the root."""
    keys: Mapping[str, Section | None]

    @classmethod
    def of(
        cls,
        model: type[BaseModel],
        path: str = "",
        replace: Mapping[str, type[BaseModel]] | None = None,
    ) -> Section:
        """The section of a model's fields.

        Args:
            path: where the model stands.
            replace: dotted path -> the model that checks what a looser type takes there.
        """
        replace = replace or {}
        keys: dict[str, Section | None] = {}
        for name, field in model.model_fields.items():
            below = join(path, name)
            nested = replace.get(below) or _nested_model(field.annotation)
            if nested and _is_list(field.annotation):
                below += "[]"
            keys[name] = cls.of(nested, below, replace) if nested else None
        return cls(path, keys)

    def walk(self) -> Iterator[Section]:
        """This section and all below it."""
        yield self
        for below in self.keys.values():
            if below:
                yield from below.walk()

    def problems(self, document: object) -> list[str]:
        """One line for each key of the document that is not known where it stands."""
        return list(self._problems(document, "", self))

    def _problems(self, document: object, place: str, root: Section) -> Iterator[str]:
        if isinstance(document, list):
            for index, item in enumerate(document):
                yield from self._problems(item, join(place, index), root)
        elif isinstance(document, Mapping):
            for key, value in document.items():
                if key not in self.keys:
                    yield f"{join(place, str(key))}: unknown key; {self._hint(str(key), root)}"
                elif below := self.keys[key]:
                    yield from below._problems(value, join(place, key), root)

    def _hint(self, key: str, root: Section) -> str:
        homes = [section.path or "the top" for section in root.walk() if key in section.keys]
        if homes:
            return f"it belongs under {' or '.join(homes)}"
        if near := difflib.get_close_matches(key, self.keys, n=1, cutoff=0.5):
            return f"the nearest known key is {near[0]}"
        anywhere = {
            name: join(section.path, name) for section in root.walk() for name in section.keys
        }
        if near := difflib.get_close_matches(key, anywhere, n=1):
            return f"the nearest known key is {anywhere[near[0]]}"
        return f"known here: {', '.join(self.keys)}"


def _nested_model(annotation: object) -> type[BaseModel] | None:
    """The pydantic model inside an optional, a list or a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) is dict:
        return None
    members = (_nested_model(member) for member in typing.get_args(annotation))
    return next(filter(None, members), None)


def _is_list(annotation: object) -> bool:
    if typing.get_origin(annotation) is list:
        return True
    return any(_is_list(member) for member in typing.get_args(annotation))
