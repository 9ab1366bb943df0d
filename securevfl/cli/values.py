"""Values of the line as commands take them: text, numbers, paths, and lists of these.

Typer has them read by pydantic, which takes longer to load than all else that answers a typing error.
"""

from __future__ import annotations

from typing import Any, get_args

import typer

EXPECTED = {int: "a whole number", float: "a number"}


class _Value:
    """Reads what is given for one parameter."""

    def __init__(self, kind: Any) -> None:
        self.kind = (get_args(kind) or (kind,))[0]

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        return [self._one(each, param, ctx) for each in value] if several else self._one(value, param, ctx)

    def _one(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self.kind(value)
        except ValueError:
            message = f"{value!r} is not {EXPECTED.get(self.kind, 'such a value')}"
            raise typer.BadParameter(message, ctx=ctx, param=param) from None


class PlainValues:
    """For a command of typer's: reads the values of its parameters, of ``--help`` too.

    A typer that keeps its own reader elsewhere goes on by itself.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            vars(param)["_runtime_param"] = _Value(param.type_descriptor.annotation)
        return params
