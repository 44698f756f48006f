"""The page /docs: the OpenAPI document as one HTML page, which loads nothing from anywhere."""

import html
import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import HTMLResponse, Response

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}"
    "code,pre{font:14px ui-monospace,monospace}pre{overflow:auto;background:#8882;padding:.6rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.2rem .8rem "
    ".2rem 0;border-bottom:1px solid #8884}h2{margin-top:2.5rem}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}a{color:#8bf}}"
)
# The page runs no script and loads nothing, whatever a description says.
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


class DocsPage:
    """Answers GET /docs. `openapi`: returns the document, which is read at the first request."""

    def __init__(self, openapi: Callable[[], dict[str, Any]]) -> None:
        self._openapi = openapi
        self._text: str | None = None

    async def answer(self) -> Response:
        """Returns the page."""
        if self._text is None:
            self._text = page_of(self._openapi())
        return HTMLResponse(self._text, headers=_HEADERS)


def page_of(document: Mapping[str, Any]) -> str:
    """Returns an OpenAPI document as an HTML page."""
    info = document["info"]
    title = html.escape(f"{info['title']} {info['version']}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        '<p>The same as a document for programs: <a href="openapi.json"><code>/openapi.json</code></a>.</p>',
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(path, method, operation))
    parts.append("<h2>Types</h2>")
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        parts.append(_schema(name, schema))
    return "".join([*parts, "</body></html>"])


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    parts = [f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>"]
    if operation.get("description"):
        parts.append(f"<p>{html.escape(operation['description'])}</p>")
    for one in operation.get("parameters", ()):
        text = html.escape(one.get("description", ""))
        parts.append(f"<p>{html.escape(one['in'])} <code>{html.escape(one['name'])}</code> {text}</p>")
    body = operation.get("requestBody", {}).get("content", {})
    for kind, content in body.items():
        parts.append(f"<p>Body, {html.escape(kind)}: {_kind(content.get('schema', {}))}</p>")
    rows = []
    for status, answer in operation["responses"].items():
        kinds = [_kind(content.get("schema", {})) for content in answer.get("content", {}).values()]
        description = html.escape(answer.get("description", ""))
        rows.append(
            f"<tr><td>{html.escape(status)}</td><td>{description}</td><td>{', '.join(kinds)}</td></tr>"
        )
    return "".join([*parts, "<table>", *rows, "</table>"])


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    anchor = html.escape(name, quote=True)
    parts = [f'<h3 id="{anchor}"><code>{anchor}</code></h3>']
    if schema.get("description"):
        parts.append(f"<p>{html.escape(schema['description'])}</p>")
    required = schema.get("required", ())
    rows = []
    for field, one in schema.get("properties", {}).items():
        text = html.escape(one.get("description", "")) if isinstance(one, dict) else ""
        needed = ", required" if field in required else ""
        rows.append(
            f"<tr><td><code>{html.escape(field)}</code></td><td>{_kind(one)}{needed}</td><td>{text}</td></tr>"
        )
    return "".join([*parts, "<table>", *rows, "</table>"])


def _kind(schema: Any) -> str:
    """Returns what a schema allows, as HTML; a named type is a link to it."""
    if not isinstance(schema, dict):
        return "any value"
    if "$ref" in schema:
        name = html.escape(schema["$ref"].rsplit("/", 1)[-1], quote=True)
        return f'<a href="#{name}">{name}</a>'
    for joined in ("anyOf", "oneOf", "allOf"):
        if joined in schema:
            return " or ".join(map(_kind, schema[joined]))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{html.escape(json.dumps(value))}</code>" for value in values)
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if isinstance(kind, list):
        return html.escape(" or ".join(kind))
    return html.escape(kind) if kind else "any value"
