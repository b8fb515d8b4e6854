"""The endpoints of stored responses."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse

from tangram.serve.bodies.body import Json
from tangram.serve.observability.record import record_in
from tangram.serve.responses.response_memory import ResponseMemory, name_owner
from tangram.serve.responses.responses_schema import Included
from tangram.serve.transport.api_errors import ApiError

Salt = Annotated[
    str, Query(max_length=1024, description="the cache_salt with which the response was asked for")
]
Include = Annotated[list[Included], Query(alias="include[]", description="without effect")]


def add_response_routes(app: FastAPI, memory: ResponseMemory) -> None:
    """Have `app` tell of the responses in `memory`."""
    path = "/v1/responses/{id}"

    @app.get(path, response_model=None)
    async def get_response(
        id: str,
        request: Request,
        cache_salt: Salt = "",
        include: Include = [],  # noqa: B006 (FastAPI copies it)
        stream: Literal["false"] | None = None,
    ) -> Response:
        found = await memory.find(id, name_owner(record_in(request.scope), cache_salt))
        return await asyncio.to_thread(JSONResponse, found.body)

    @app.delete(path)
    async def delete_response(id: str, request: Request, cache_salt: Salt = "") -> Json:
        await memory.remove(id, name_owner(record_in(request.scope), cache_salt))
        return {"id": id, "object": "response", "deleted": True}

    @app.post(f"{path}/cancel", response_model=None)
    async def cancel_response(id: str, request: Request, cache_salt: Salt = "") -> Response:
        found = await memory.cancel(id, name_owner(record_in(request.scope), cache_salt))
        return await asyncio.to_thread(JSONResponse, found.body)

    @app.get(f"{path}/input_items", response_model=None)
    async def list_input_items(
        id: str,
        request: Request,
        cache_salt: Salt = "",
        include: Include = [],  # noqa: B006
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        items = await memory.list_input(id, name_owner(record_in(request.scope), cache_salt))
        page = _turn_page(items if order == "asc" else items[::-1], after, limit)
        return await asyncio.to_thread(JSONResponse, page)


def _turn_page(items: list[Json], after: str | None, limit: int) -> Json:
    """The `limit` items that follow item `after`. Raises `ApiError` if there is no such item."""
    begin = 0
    if after is not None:
        # Clients name items: of two with one name, pages go on from the last.
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            message = "after is the id of no input item of this response: take it from last_id"
            raise ApiError(400, message, param="after", code="invalid_value")
        begin = places[-1] + 1
    data = items[begin : begin + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + limit < len(items),
    }
