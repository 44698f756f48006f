"""Grammars that are hard to compile: one that takes long, and one as deep as a test wants it."""

import json

from lightkv.router.sampling_params import Grammar

# Compiling it takes many seconds.
SLOW = {"type": "object", "properties": {f"x{i}": {"type": "string", "maxLength": i} for i in range(4000)}}


def chain(levels: int) -> Grammar:
    """A schema whose objects refer to each other, `levels` deep."""
    definitions: dict[str, object] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(levels)
    }
    definitions[f"d{levels}"] = {"type": "integer"}
    return Grammar("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": definitions}))
