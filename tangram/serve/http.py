"""The server: endpoints of OpenAI's and Anthropic's APIs over one engine.

`build_app` makes the ASGI application, `serve_on` runs it on an open port until a signal ends it.
The application's lifespan starts and stops the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from tangram.serve.answers.bridge import PENDING_EVENTS, Limits, ServedEngine
from tangram.serve.api_document.openapi import DOCS, document
from tangram.serve.bodies.body import Json
from tangram.serve.chat.schema import ChatRequest, CompletionRequest
from tangram.serve.extension import Extension
from tangram.serve.messages.messages_schema import CountTokensRequest, MessagesRequest
from tangram.serve.observability.logs import LossLog, log_request
from tangram.serve.observability.record import RecordRequests, RecordSink
from tangram.serve.observability.tracing import Traces, traces_to
from tangram.serve.observability.vllm_names import VllmNames
from tangram.serve.options import ServerOptions
from tangram.serve.process import Server, raise_file_limit
from tangram.serve.receiving import BodyRoute
from tangram.serve.responses.response_memory import ResponseMemory
from tangram.serve.responses.response_routes import add_response_routes
from tangram.serve.responses.responses_schema import ResponsesRequest
from tangram.serve.service import Service
from tangram.serve.tokens import DetokenizeRequest, TokenizeRequest
from tangram.serve.transport.api_errors import install_handlers
from tangram.serve.transport.guard import (
    MAX_HEADER_BYTES,
    BoundRequests,
    NameRequests,
    RequireKeys,
    check_served_name,
)
from tangram.serve.transport.wire import MAX_CONNECTIONS, HttpProtocol, http_protocol
from tangram.version import __version__

# What pages of allowed origins may send and read. Keys are in a header, so no cookies are needed.
_CORS: dict[str, Any] = {
    "allow_methods": ("GET", "POST", "DELETE"),
    "allow_headers": ("*",),
    "allow_private_network": True,
    "expose_headers": ("x-request-id", "request-id", "retry-after"),
}


def build_app(
    engine: ServedEngine,
    *,
    served_model_name: str,
    options: ServerOptions | None = None,
    max_queue: int | None = None,
    pending_events: int = PENDING_EVENTS,
    traces: Traces | None = None,
    web: Extension | None = None,
) -> FastAPI:
    """The application that serves `engine` as `served_model_name`; `state.service` is its
    `Service`.

    With API keys in `options`, every path requires one but /health, /ready and files of pages.
    `max_queue` is the engine's. Without `traces` the options say where these go. `web` adds routes
    of its own. Raises `ConfigError` for a wrong name of the model, and if traces cannot be sent or
    responses cannot be stored.
    """
    options, web = options or ServerOptions(), web or Extension()
    traces = traces or traces_to(options.otlp_endpoint, served_model_name)
    check_served_name(served_model_name)
    limits = Limits(options.request_timeout_s, pending_events, max_queue)
    let_by, locked = options.unknown_fields == "warn", bool(options.api_key)
    memory = ResponseMemory.of(options)
    service = Service(engine, served_model_name, limits, let_by, web, memory)
    sinks: list[RecordSink] = [service.metrics.count_request, log_request, LossLog()]
    if options.metrics_aliases is not None:
        service.metrics.registry.register(VllmNames(service.metrics, served_model_name))
    if traces is not None:
        sinks.append(traces)
    sinks.append(web.count)
    app = FastAPI(
        title="Tangram",
        lifespan=_make_lifespan(service, traces, web),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the address of a redirect would come from the Host header
    )
    app.router.route_class = BodyRoute
    app.state.service = service
    install_handlers(app)
    _add_layers(app, options, sinks, web)
    _add_completion_routes(app, service)
    add_response_routes(app, service.memory)
    _add_other_routes(app, service)
    web.mount(app, locked=locked)
    _add_docs(app, served_model_name, locked=locked)
    return app


def _make_lifespan(
    service: Service, traces: Traces | None, web: Extension
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Starts and stops the engine with the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            web.drain()
            await service.stop()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    return lifespan


def _add_layers(
    app: FastAPI, options: ServerOptions, sinks: Sequence[RecordSink], web: Extension
) -> None:
    """The middleware. What is added later is farther out."""
    app.add_middleware(BoundRequests, max_body_bytes=int(options.max_body_mb * 1_000_000))
    if options.api_key:

        def is_open(path: bytes) -> bool:
            return DOCS.has(path) or web.is_open(path)

        app.add_middleware(RequireKeys, api_keys=options.api_key, is_open=is_open)
    app.add_middleware(NameRequests)
    if options.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=options.allowed_origins, **_CORS)
    app.add_middleware(RecordRequests, sinks=sinks)


def _add_docs(app: FastAPI, model: str, *, locked: bool) -> None:
    described = partial(document, app, version=__version__, model=model, locked=locked)
    app.openapi = cache(described)  # type: ignore[method-assign]
    DOCS.mount(app)


def _add_completion_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> Json:
        return {"input_tokens": await service.count_tokens(body, request)}

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Json:
        service.check_model(body.model)
        tokens = await service.preparation.of(request, body.tokens, service)
        return {
            "count": len(tokens),
            "max_model_len": service.engine.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Json:
        service.check_model(body.model)
        return {
            "prompt": await service.preparation.of(
                request, service.prompts.detokenize, body.tokens, "tokens"
            )
        }


def _add_other_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{model:path}")
    async def model_card(model: str) -> Json:
        service.check_model(model)
        return _model_card(service)

    @app.get("/health")
    async def health() -> JSONResponse:
        status = (
            "ok"
            if service.engine.healthy
            else "the engine has stopped, or hangs: the server's log has the reason"
        )
        return JSONResponse({"status": status}, 200 if service.engine.healthy else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)

    @app.get("/version")
    async def version() -> Json:
        return {"version": __version__}

    @app.get("/metrics", response_model=None)
    def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _model_card(service: Service) -> Json:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created_s,
        "owned_by": "tangram",
        "max_model_len": service.engine.max_model_len,
        "default_sampling": asdict(service.engine.sampling),
    }


def transport_options(protocol: type[HttpProtocol] = HttpProtocol) -> Json:
    """The options of `uvicorn.Config` that bound what a client can send."""
    return {
        "http": protocol,
        "loop": "asyncio",  # Ray brings uvloop, which uvicorn would prefer: one loop is tested
        "ws": "none",
        "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
        "server_header": False,
    }


def make_server(
    app: FastAPI, *, shutdown_grace_s: float, on_ready: Callable[[], None] = lambda: None
) -> Server:
    """The server of `app`: `serve(sockets)` serves until it is drained, or until a signal.

    Running answers get `shutdown_grace_s` after a signal, then they end with an error. Calls
    `on_ready` when requests are answered. A second signal ends the process at once.
    """
    connections, backlog = raise_file_limit(MAX_CONNECTIONS)
    # log_config None: the caller has configured the log.
    config = uvicorn.Config(
        app,
        log_config=None,
        lifespan="on",
        backlog=backlog,
        **transport_options(http_protocol(connections)),
    )
    return Server(config, app.state.service, shutdown_grace_s, on_ready)
