"""The tools that an answer may call, and their schemas.

Where the model may choose whether it calls, a schema that cannot be followed fails no request: the
arguments of that tool are any object, and the answer has a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tangram.errors import RequestError
from tangram.serve.bodies.json_schema import SchemaBounds
from tangram.serve.bodies.structured import Tool, check_arguments, measure_tools
from tangram.serve.chat.schema import ChatRequest

_MOST_WARNINGS = 16
_MOST_WARNING_CHARACTERS = 400


@dataclass
class Offer:
    """The `tools` that are offered, by their places in the request.

    With `free` the model may choose. `faults` say why tools are held to no schema.
    """

    free: bool
    tools: dict[int, Tool]
    faults: dict[int, RequestError] = field(default_factory=dict)

    @classmethod
    def of(cls, body: ChatRequest, bounds: SchemaBounds) -> Offer:
        """The offer of `body`.

        Raises `RequestError` for a schema that nothing can be made of, or that must be followed and
        cannot.
        """
        measure_tools(body.tools, bounds)
        names = {tool.function.name for tool in body.offered}
        placed = enumerate(body.tools)
        offer = cls(
            body.tool_choice == "auto",
            {at: tool for at, tool in placed if tool.function.name in names},
        )
        for at, tool in list(offer.tools.items()):
            try:
                check_arguments(tool, f"tools[{at}].function", bounds)
            except RequestError as error:
                if tool.custom is not None:
                    raise error.rename(f"tools[{at}].custom.format") from error
                offer.loosen([at], error)
        return offer

    @property
    def held(self) -> dict[int, Tool]:
        """The tools whose arguments are held to their schemas, though they need not be."""
        return {
            at: tool
            for at, tool in self.tools.items()
            if self.free and at not in self.faults and not tool.function.strict
        }

    def loosen(self, places: Iterable[int], error: RequestError) -> None:
        """Hold the tools at `places` to no schema. Raises `error` if one of them must be."""
        held = self.held
        for at in places:
            if at not in held:
                raise error
            self.tools[at] = held[at].loose_copy()
            self.faults[at] = error

    def list_warnings(self, rename_field: Callable[[str], str]) -> list[str]:
        """What the answer says of `faults`, in the names of fields that `rename_field` makes."""
        warnings = []
        for at, error in list(self.faults.items())[:_MOST_WARNINGS]:
            reason = str(error.rename(rename_field(error.field)))[:_MOST_WARNING_CHARACTERS]
            name = self.tools[at].function.name
            warnings.append(f"the arguments of {name!r} are held to no schema: {reason}")
        if (more := len(self.faults) - len(warnings)) > 0:
            warnings.append(f"so are those of {more} more tools")
        return warnings
