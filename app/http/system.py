"""Probes, metrics, models, and signing in."""

from __future__ import annotations

import time

from starlette.responses import Response
from starlette.routing import BaseRoute

from app.backend import Status
from app.errors import ApiError
from app.http.replies import JSON
from app.http.routing import Call, route
from app.metrics import Metrics, engine_snapshot
from app.models import Login, validate
from app.principal import COOKIE, COOKIE_SECONDS, Keys
from app.specs import served_model

STARTED = int(time.time())


def system_routes(keys: Keys) -> list[BaseRoute]:
    async def login(call: Call) -> Response:
        key = validate(Login, await call.json()).key
        cookie = keys.login(key) if keys.required else None
        if keys.required and cookie is None:
            message = "That key is not known here."
            raise ApiError(message, code="invalid_api_key", status=401, type="authentication_error")
        response = JSON({"object": "login", "signed_in": True})
        if cookie is not None:
            response.set_cookie(
                COOKIE,
                cookie,
                max_age=COOKIE_SECONDS,
                httponly=True,
                samesite="strict",
                secure=call.request.url.scheme == "https",
            )
        return response

    return [
        route("/healthz", healthz, ["GET"]),
        route("/readyz", readyz, ["GET"]),
        route("/metrics", metrics, ["GET"]),
        route("/login", login, ["POST"]),
        route("/logout", logout, ["POST"]),
        route("/v1/models", models, ["GET"]),
        route("/v1/models/{model:path}", model, ["GET"]),
    ]


async def logout(call: Call) -> Response:
    response = JSON({"object": "login", "signed_in": False})
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


async def healthz(call: Call) -> Response:
    """The process is up and answers; nothing is said about the model."""
    return JSON({"status": "ok"})


async def readyz(call: Call) -> Response:
    """200 when a turn would be taken now, else 503 and why not."""
    services = call.services
    backend = services.backend
    if services.draining:
        return JSON({"status": "draining"}, 503)
    if backend.status is not Status.READY:
        loading = {"status": backend.status.value, "stage": backend.stage, "fraction": backend.fraction}
        return JSON(loading, 503)
    if not backend.parts.engine.ready:
        return JSON({"status": "engine restarting"}, 503)
    return JSON({"status": "ready", "model": backend.parts.served_model_name})


async def metrics(call: Call) -> Response:
    services = call.services
    stats, info = None, None
    if services.backend.status is Status.READY:
        stats, info = await engine_snapshot(services.backend.parts.engine)
    text = services.metrics.render(
        stats,
        info,
        connections=len(services.connections),
        outbox_bytes=sum(connection.outbox.size for connection in services.connections),
    )
    return Response(text, media_type=Metrics.content_type)


async def models(call: Call) -> Response:
    return JSON({"object": "list", "data": [_model(call)]})


async def model(call: Call) -> Response:
    served_model(call.path("model"), call.services.served_model_name)
    return JSON(_model(call))


def _model(call: Call) -> dict[str, object]:
    parts = call.services.backend.parts
    described: dict[str, object] = {
        "id": parts.served_model_name,
        "object": "model",
        "created": STARTED,
        "owned_by": "pageturner",
    }
    if parts.engine.ready:
        described["max_model_len"] = parts.engine.info.max_model_len
    return described
