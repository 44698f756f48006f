"""Random JSON schemas whose texts are short, so that a model of random weights reaches their ends."""

import random
from typing import Any

WORDS = ("red", "green", 'a "quoted" one', "ünï", "x/y", "")
PATTERNS = ("^[a-c]{1,4}$", "^[0-9]{3}-[0-9]{2}$", "^(yes|no)$", "^A[xyz]?$")
FORMATS = ("date", "time", "uuid", "ipv4")


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Returns a schema with objects and arrays of up to `depth` levels."""
    kinds = ["integer", "boolean", "null", "enum", "const", "string", "pattern", "format", "number"]
    if depth:
        kinds += ["object", "object", "array", "array", "anyOf", "ref"]
    match rng.choice(kinds):
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
        case "number":
            return {"type": "number", "enum": [0.5, -1.25, 3, 1e3][: rng.randint(1, 4)]}
        case "boolean":
            return {"type": rng.choice(["boolean", ["boolean", "null"]])}
        case "null":
            return {"type": "null"}
        case "enum":
            return {"enum": rng.sample([*WORDS, 1, None, True, 2.5], rng.randint(1, 5))}
        case "const":
            return {"const": rng.choice(WORDS)}
        case "string":
            low = rng.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 5)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case "format":
            return {"type": "string", "format": rng.choice(FORMATS)}
        case "array":
            low = rng.randint(0, 2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "ref":
            named = random_schema(rng, 0)
            properties = {"first": {"$ref": "#/$defs/named"}, "second": {"$ref": "#/$defs/named"}}
            return _object(properties, ["first"]) | {"$defs": {"named": named}} if depth == 3 else named
        case _:
            names = rng.sample(["name", "age", "a b", "tags", "é", "note"], rng.randint(0, 4))
            properties = {name: random_schema(rng, depth - 1) for name in names}
            return _object(properties, [name for name in names if rng.random() < 0.7])


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
