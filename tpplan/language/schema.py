"""The plan language as a JSON Schema, for editors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpplan.language.styles import (
    GATHERED,
    KERNEL_CHOICES,
    KERNEL_KINDS,
    KEYS,
    OVERLAP_CHOICES,
    RECOMPUTE_CHOICES,
    REMOVE,
    SAVE_CHOICES,
    STYLES,
    VERSION,
    WAITING,
    Kind,
    Option,
)

SCHEMA_FILE = Path(__file__).with_name("schema.json")

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_NAME = {"type": "string", "minLength": 1}
_IDENTIFIER = {"type": "string", "pattern": "^[^\\W\\d]\\w*$"}
_DOTTED = {"type": "string", "pattern": "^[^\\W\\d]\\w*(\\.\\w+)*$"}
_EXPRESSION = {"type": "string", "pattern": "^[A-Za-z0-9_+\\-*/%() ]+$", "maxLength": 200}
_POSITIVE = {"type": "integer", "minimum": 1}
_PATTERN = {"type": "string", "minLength": 1, "maxLength": 1000}
_NAMES = {"type": "array", "items": _NAME, "minItems": 1, "uniqueItems": True}

_KINDS: Mapping[Kind, Mapping[str, Any]] = {
    Kind.FLAG: {"type": "boolean"},
    Kind.CHOICE: {"type": "string"},
    Kind.COUNT: {"anyOf": [_POSITIVE, _EXPRESSION]},
    Kind.NAMES: _NAMES,
    Kind.PACKED: {
        "anyOf": [
            _NAMES,
            {
                "type": "object",
                "properties": {"parts": _NAMES, "repeat": {"anyOf": [_POSITIVE, _IDENTIFIER]}},
                "required": ["parts"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "propertyNames": {"not": {"enum": ["parts", "repeat"]}, **_IDENTIFIER},
                "additionalProperties": {
                    "type": "array",
                    "items": {"anyOf": [_POSITIVE, _EXPRESSION]},
                    "minItems": 2,
                    "maxItems": 2,
                },
                "minProperties": 2,
            },
        ]
    },
    Kind.EXPRESSIONS: {
        "type": "object",
        "propertyNames": _DOTTED,
        "additionalProperties": {"anyOf": [{"type": "integer"}, _EXPRESSION]},
        "minProperties": 1,
    },
    Kind.DIMENSION: {"type": "integer"},
    Kind.DIMENSIONS: {
        "type": "object",
        "propertyNames": _IDENTIFIER,
        "additionalProperties": {"type": "integer"},
        "minProperties": 1,
    },
}


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that ``schema.json`` holds."""
    rules = {
        "type": "object",
        "propertyNames": _PATTERN,
        "additionalProperties": {"$ref": "#/$defs/rule"},
    }
    types: dict[str, dict[str, Any]] = {
        "tpplan": {"const": VERSION},
        "description": {"type": "string"},
        "models": {"type": "array", "items": _NAME, "uniqueItems": True},
        "sequence_parallel": {"type": "boolean", "default": True},
        "extends": _NAME,
        "rules": rules,
        "optional": rules,
        "layers": _PATTERN,
        "sequence_dim": {"type": "integer", "minimum": 0, "default": 1},
        "recompute": {"type": "array", "items": {"enum": list(RECOMPUTE_CHOICES)}},
        "overlap": {"enum": list(OVERLAP_CHOICES), "default": WAITING},
        "save": {"enum": list(SAVE_CHOICES), "default": GATHERED},
        "kernels": {
            "anyOf": [
                {"enum": list(KERNEL_CHOICES)},
                {
                    "type": "object",
                    "properties": {
                        kind: {"description": summary, "enum": list(KERNEL_CHOICES)}
                        for kind, summary in KERNEL_KINDS.items()
                    },
                    "additionalProperties": False,
                },
            ]
        },
    }
    return {
        "$schema": _DRAFT,
        "title": "tpplan sharding plan",
        "type": "object",
        "properties": {key: {"description": KEYS[key], **types[key]} for key in KEYS},
        "required": ["tpplan"],
        "additionalProperties": False,
        "anyOf": [
            {"required": ["extends"]},
            {"required": ["rules"], "properties": {"rules": {"minProperties": 1}}},
            {"required": ["optional"], "properties": {"optional": {"minProperties": 1}}},
        ],
        "$defs": {"rule": _rule()},
    }


def _rule() -> dict[str, Any]:
    words = [{"const": name, "description": style.summary} for name, style in STYLES.items()]
    removal = {"const": REMOVE, "description": "drop the inherited rule"}
    detailed = [
        {
            "type": "object",
            "description": style.summary,
            "properties": {
                "style": {"const": name},
                **{key: _option(option) for key, option in style.options.items()},
            },
            "required": ["style"],
            "additionalProperties": False,
        }
        for name, style in STYLES.items()
    ]
    return {"anyOf": [*words, removal, *detailed]}


def _option(option: Option) -> dict[str, Any]:
    values = {"enum": list(option.choices)} if option.choices else _KINDS[option.kind]
    return {"description": option.summary, **values}
