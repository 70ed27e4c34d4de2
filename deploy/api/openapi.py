"""The API's documentation in OpenAPI format, and as an HTML page that loads nothing from elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deploy.api.errors import is_anthropic

_REF = "#/components/schemas/"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ccc;padding:.2rem .6rem;text-align:left;"
    "vertical-align:top}code{font-size:.95em}h2{margin-top:2.5rem}"
)


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _errors(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "An error", "content": {"application/json": {"schema": schema}}}


_TEXT = {"type": "string"}
_ERRORS = _errors(_object(error=_object(message=_TEXT, type=_TEXT, param={}, code={})))
_ANTHROPIC_ERRORS = _errors(_object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)))


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """FastAPI's ``openapi_extra`` of a route that reads its body itself."""
    schema = {"$ref": f"{_REF}{model.__name__}"}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    if "stream" in model.model_fields:
        extra["responses"] = {"200": {"content": {"text/event-stream": {}}}}
    return extra


def describe(
    app: FastAPI, bodies: Sequence[type[BaseModel]], *, asks_for_key: bool, refuses_unknown: bool
) -> dict[str, Any]:
    """The OpenAPI document of the app's routes, with the schemas of ``bodies``."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF + "{model}")
    components = document.setdefault("components", {})
    components["schemas"] = schemas["$defs"]  # instead of FastAPI's error
    if not refuses_unknown:
        for schema in schemas["$defs"].values():
            schema.pop("additionalProperties", None)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # of FastAPI, which never answers with it here
            operation["responses"]["default"] = _ANTHROPIC_ERRORS if is_anthropic(path) else _ERRORS
    if asks_for_key:
        header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}, "header": header}
        document["security"] = [{"key": []}, {"header": []}]
    return document


def page(document: Mapping[str, Any]) -> str:
    """The document as an HTML page, without scripts, fonts or images."""
    title = escape(document["info"]["title"])
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"]
    parts.append(f"<h1>{title} {escape(document['info']['version'])}</h1>")
    parts.append('<p>Also as <a href="openapi.json">openapi.json</a>. Errors are objects <code>error</code>.</p>')
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>")
            parts.extend(_body(operation, document))
    return "".join(parts)


def _body(operation: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" not in content:
        return
    schemas = document["components"]["schemas"]
    schema = schemas[content["application/json"]["schema"]["$ref"].removeprefix(_REF)]
    yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
    for name, field in schema["properties"].items():
        needed = "required" if name in schema.get("required", ()) else ""
        yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td><td>{needed}</td></tr>"
    yield "</table>"


def _type(schema: Mapping[str, Any]) -> str:
    """A short name of the schema's type."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_REF)
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        names = [_type(one) for one in alternatives if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    if "enum" in schema or "const" in schema:
        return " or ".join(repr(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "not supported yet"))
