"""What a scoring service offers, for programs (OpenAPI) and as a page of its own for people."""

from __future__ import annotations

from html import escape
from typing import Any

from securevfl import __version__

_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
}
_CODES = {
    400: "The body is no JSON object of this form, an ID comes twice, or there is no Idempotency-Key.",
    403: "Somebody was in the training, a privacy budget allows no more, or the client is not on the list.",
    404: "An ID that the organisations do not share, or an unknown model.",
    409: "The Idempotency-Key was used for another request.",
    411: "The length of the body was not stated.",
    413: "The body, or the list of IDs, is too long.",
    415: "The body is not application/json.",
    429: "The quota that the organisations agreed on is used up.",
    502: "An organisation has answered what makes no sense; nothing is returned.",
    503: "An organisation is away, too many wait, or the service ends: ask again with the same key.",
    507: "A disk is full; nothing is lost: ask again with the same key.",
}


def _failures() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(code): {"description": words, "content": content} for code, words in _CODES.items()}


def _answer(words: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"200": {"description": words, "content": {"application/json": {"schema": schema}}}}


_SCORE: dict[str, Any] = {
    "summary": "Score one person or several",
    "description": "One key stands for one request: whoever asks again with it gets the same bytes, and "
    "nobody is scored, counted or charged again. A request is answered wholly or not at all.",
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": True,
            "schema": {"type": "string", "minLength": 1, "maxLength": 64},
        }
    ],
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Request"}}},
    },
    "responses": {**_answer("The scores", {"$ref": "#/components/schemas/Scores"}), **_failures()},
}
_MODELS = {
    "type": "object",
    "properties": {"default": {"type": "string"}, "models": {"type": "array", "items": {"type": "string"}}},
}
DESCRIPTION: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "securevfl scoring service", "version": __version__},
    "paths": {
        "/v1/score": {"post": _SCORE},
        "/v1/models": {
            "get": {"summary": "The models, and which answers", "responses": _answer("Models", _MODELS)}
        },
        "/v1/models/default": {
            "post": {
                "summary": "Choose which model answers requests that name none",
                "requestBody": {
                    "content": {
                        "application/json": {
                            "schema": {"type": "object", "properties": {"model": {"type": "string"}}}
                        }
                    }
                },
                "responses": _answer("Models", _MODELS),
            }
        },
        "/health": {
            "get": {
                "summary": "Whether somebody would be scored now",
                "responses": {"200": {"description": "Yes"}, "503": {"description": "Not now"}},
            }
        },
        "/metrics": {
            "get": {"summary": "Figures for Prometheus", "responses": {"200": {"description": "Text"}}}
        },
    },
    "components": {
        "schemas": {
            "Error": _ERROR,
            "Request": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "id": {"type": "string", "maxLength": 256},
                    "ids": {"type": "array", "minItems": 1, "items": {"type": "string", "maxLength": 256}},
                    "model": {"type": "string", "description": "The default where it is left out"},
                },
            },
            "Scores": {
                "type": "object",
                "required": ["model", "scores", "guarantee"],
                "properties": {
                    "model": {"type": "string"},
                    "scores": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["id", "score"],
                            "properties": {
                                "id": {"type": "string"},
                                "score": {
                                    "oneOf": [
                                        {"type": "number"},
                                        {"type": "object", "additionalProperties": {"type": "number"}},
                                    ]
                                },
                            },
                        },
                    },
                    "guarantee": {"type": "string"},
                },
            },
        }
    },
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:#222;"
    "background:#fff}code,pre{font-family:ui-monospace,monospace;background:#f3f3f3;padding:.1rem .3rem}"
    "pre{padding:.8rem;overflow:auto}table{border-collapse:collapse;width:100%}td{border-top:1px solid #ddd;"
    "padding:.4rem .6rem;vertical-align:top}@media(prefers-color-scheme:dark){body{color:#ddd;"
    "background:#181818}code,pre{background:#2a2a2a}td{border-color:#444}}"
)
_EXAMPLE = """curl --json '{"ids": ["4711", "4712"]}' -H 'Idempotency-Key: order-881' HOST/v1/score"""


def page() -> str:
    """The same for people; it loads nothing from anywhere."""
    rows = "".join(
        f"<tr><td><code>{method.upper()} {escape(path)}</code></td><td>{escape(each['summary'])}</td></tr>"
        for path, methods in DESCRIPTION["paths"].items()
        for method, each in methods.items()
    )
    codes = "".join(f"<tr><td>{code}</td><td>{escape(words)}</td></tr>" for code, words in _CODES.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Scoring service</title><style>{_STYLE}</style></head><body><h1>Scoring service</h1>"
        f"<p>{escape(_SCORE['description'])}</p><pre>{escape(_EXAMPLE)}</pre><h2>Pages</h2>"
        f"<table>{rows}</table><p>For programs: <code>/openapi.json</code></p><h2>Refusals</h2>"
        f'<p>Each is one line, <code>{{"error": "..."}}</code>.</p><table>{codes}</table></body></html>'
    )
