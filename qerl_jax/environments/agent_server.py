"""The HTTP server that agents reach the policy through: vLLM's token route and OpenAI's chat route.

It listens on the loopback interface, in a thread of the process that trains, with a secret key for
each session. A request that cannot be answered gets the JSON of OpenAI's errors.
"""

import asyncio
import contextvars
import http
import importlib.util
import json
import math
import resource
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from qerl_jax.environments.chat import ChatWriter
from qerl_jax.environments.gateway import (
    Asked,
    Gateway,
    Job,
    Prompt,
    RequestError,
    Session,
    SessionRecord,
    TokenPrompt,
)
from qerl_jax.environments.roles import OPEN
from qerl_jax.errors import UserError

MODEL = "policy"  # the name of the model
_MOST_BYTES = 16 << 20  # of a request
_MOST_CONNECTIONS = 100_000  # where a process may have any number of files
_HEAD_SECONDS = 30.0  # in which a request must have begun on a connection
_BODY_SECONDS = 30.0  # in which its content must have arrived
_START_SECONDS = 30.0
_LOWEST_LOGPROB = -9999.0  # in JSON, which has no infinity, as in vLLM


class AgentServer:
    """A running server. It ends with the process, or with `stop`.

    Attributes:
        gateway: the sessions.
        root_url: the address, without /v1.
    """

    def __init__(self, gateway: Gateway, writer: ChatWriter):
        """Starts the server on a free port of the loopback interface.

        Raises:
            UserError: the packages are missing, or it does not start.
        """
        lacking = [name for name in ("uvicorn", "starlette") if not importlib.util.find_spec(name)]
        if lacking:
            raise UserError(
                f"serving agents needs {' and '.join(lacking)}: pip install 'qerl-jax[agents]', or "
                "uv sync --extra agents"
            )
        import uvicorn

        self.gateway, self._writer = gateway, writer
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.root_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        config = uvicorn.Config(
            self._application(),
            log_config=None,
            log_level="critical",
            access_log=False,
            http=_protocol(files // 2 if files != resource.RLIM_INFINITY else _MOST_CONNECTIONS),
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        run = contextvars.copy_context().run  # The date of chat templates is that of the run.
        self._thread = threading.Thread(
            target=lambda: run(self._server.run, sockets=[self._socket]), daemon=True, name="agents"
        )
        self._thread.start()
        ends = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > ends:
                raise UserError(f"the server of agents does not start at {self.root_url}")
            time.sleep(0.01)

    def open(self, job: Job) -> Session:
        """Opens the session of an episode.

        Raises:
            ClosedError: the rollout has ended.
        """
        record = self.gateway.open(job)
        base_url = f"{self.root_url}/sessions/{record.id}/v1"
        return Session(record.id, base_url, record.key, self.root_url, record.ended)

    def close(
        self,
        session: str,
        reward: float | None = None,
        error: str = "",
        info: Mapping[str, Any] | None = None,
    ) -> bool:
        """Ends a session by its id, and returns whether it was open.

        Args:
            session: its id.
            reward: its reward; None leaves it to the reward functions of the run.
            error: why its episode failed; '' if it did not. A session that failed has no reward.
            info: further data, which JSON can hold.
        """
        return self.gateway.close(session, reward, error, info)

    def stop(self) -> None:
        """Ends the server, and waits for it."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=10)
        self._socket.close()

    def _application(self) -> Any:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        def answers(
            route: Callable[[SessionRecord, Request], Awaitable[Response]],
        ) -> Callable[[Request], Awaitable[Response]]:
            async def handle(request: Request) -> Response:
                try:
                    return await route(self._session_of(request), request)
                except RequestError as error:
                    return JSONResponse(_error(error), status_code=error.status)

            return handle

        async def models(record: SessionRecord, request: Request) -> Response:
            limits = self.gateway.limits
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "qerl"}
            if limits is not None:
                model["max_model_len"] = limits.context
            return JSONResponse({"object": "list", "data": [model]})

        async def generate(record: SessionRecord, request: Request) -> Response:
            body = await _json_of(request)
            ids, max_tokens = _token_request(body, self._writer.tokenizer.eos_ids)
            turn = await self._answer(record, request, TokenPrompt(ids), max_tokens)
            return JSONResponse(_token_response(turn))

        async def chat(record: SessionRecord, request: Request) -> Response:
            body = await _json_of(request)
            limits = self.gateway.limits
            context = 0 if limits is None else limits.context
            prompt = self._writer.prompt(body.get("messages"), _tools_of(body), context)
            _check_stream(body)
            turn = await self._answer(record, request, prompt, _max_tokens_of(body))
            answer = _chat_response(turn, self._writer.reply(prompt, turn), body)
            if not body.get("stream"):
                return JSONResponse(answer)
            return Response(_events(answer, body), media_type="text/event-stream")

        async def failed(request: Request, error: Exception) -> Response:
            status = error.status_code if isinstance(error, HTTPException) else 500
            text = f"{request.method} {request.url.path}: {type(error).__name__} {error}"
            return JSONResponse(_error(RequestError(status, text)), status_code=status)

        routes = []
        for prefix in ("", "/sessions/{session}"):
            routes += [
                Route(f"{prefix}/v1/models", answers(models), methods=["GET"]),
                Route(f"{prefix}/inference/v1/generate", answers(generate), methods=["POST"]),
                Route(f"{prefix}/v1/chat/completions", answers(chat), methods=["POST"]),
            ]
        return Starlette(routes=routes, exception_handlers={HTTPException: failed, 500: failed})

    def _session_of(self, request: Any) -> SessionRecord:
        """The session of a request, which its key names, and its path may.

        Raises:
            RequestError: the key is that of no session, or not that of the one in the path.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        record = self.gateway.find(key.strip()) if scheme.lower() == "bearer" else None
        if record is None:
            raise RequestError(
                401,
                "Incorrect API key provided: send that of the session as Authorization: Bearer; "
                "those of earlier steps have ended",
                "invalid_api_key",
            )
        if (named := request.path_params.get("session", record.id)) != record.id:
            raise RequestError(
                401, f"the key is not that of the session {named!r:.80}", "invalid_api_key"
            )
        return record

    async def _answer(
        self, record: SessionRecord, request: Any, prompt: Prompt, max_tokens: int | None
    ) -> Asked:
        """Waits for the answer to a request, while its client does."""
        retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        self.gateway.waits(record, 1)
        try:
            turn = self.gateway.ask(record, prompt, max_tokens=max_tokens, retry=retry)
            answered = asyncio.wrap_future(turn.future)
            gone = asyncio.ensure_future(_disconnected(request))
            await asyncio.wait([answered, gone], return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not answered.done():
                raise RequestError(499, "the client has gone")
            if not turn.order or record.ending != OPEN:
                reason = f": {record.error}" if record.error else ""
                text = f"the session {record.id} has ended{reason}"
                raise RequestError(409, text, "session_closed")
            turn.delivered = True
            return turn
        finally:
            self.gateway.waits(record, -1)


def _protocol(most: int) -> type[asyncio.Protocol]:
    """The protocol of uvicorn with limits: on connections, and on the time until a request begins.

    The files and sockets of the run need some of those that a process may open.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                text = f"{most} connections are open, as many as may be: close some, or lower "
                self.refuse(503, f"{text}environment.processes, or raise the limit, ulimit -n")
            self.watch()

        def handle_events(self) -> None:
            super().handle_events()
            self.watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.watch(waits=False)

        def watch(self, *, waits: bool = True) -> None:
            waits &= self.conn.their_state is h11.IDLE
            if waits and self.timer is None:
                text = f"no request has begun within {_HEAD_SECONDS:g} s: connect again"
                self.timer = self.loop.call_later(_HEAD_SECONDS, self.refuse, 408, text)
            elif not waits and self.timer is not None:
                self.timer.cancel()
                self.timer = None

        def refuse(self, status: int, text: str) -> None:
            data = json.dumps(_error(RequestError(status, text))).encode()
            head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            self.transport.write(head.encode() + data)
            self.transport.close()

    return Protocol


async def _disconnected(request: Any) -> None:
    """Returns once the client of a request has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _json_of(request: Any) -> dict[str, Any]:
    """The JSON object that a request has.

    Raises:
        RequestError: it is none, too long, or does not arrive.
    """
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():  # To its end: clients read the answer after that.
                size += len(part)
                if size <= _MOST_BYTES:
                    body += part
    except TimeoutError as error:
        text = f"the request has not arrived within {_BODY_SECONDS:g} s: send it again"
        raise RequestError(408, text) from error
    if size > _MOST_BYTES:
        raise RequestError(413, f"the request has {size} bytes, at most {_MOST_BYTES} are read")
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()  # Half of a surrogate pair is no text.
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the request is no JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise RequestError(400, "the request is no JSON object")
    return value


def _refuse(body: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]], remedy: str) -> None:
    """Refuses fields with other values than those that are supported."""
    for name, values in supported.items():
        if name in body and body[name] not in values:
            raise RequestError(
                400, f"{name}={json.dumps(body[name])[:200]} is not supported: {remedy}"
            )


def _number(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(400, f"{name}={value!r:.80}: a whole number of at least 1 is needed")
    return value


_ONE_ANSWER = {
    "n": (None, 1),
    "best_of": (None, 1),
    "stop": (None, "", []),
    "logit_bias": (None, {}),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
}
_ONE_ANSWER_REMEDY = (
    "a request gets one answer, with the sampling of the run (rollout.temperature, rollout.stop); "
    "leave it out"
)


def _max_tokens_of(body: Mapping[str, Any]) -> int | None:
    """The limit on new tokens of a request of the chat route, after a check of its options."""
    _refuse(body, _ONE_ANSWER, _ONE_ANSWER_REMEDY)
    shape = body.get("response_format")
    if shape is not None and not (isinstance(shape, dict) and shape.get("type") == "text"):
        text = f"response_format={json.dumps(shape)[:200]} is not supported: ask for text"
        raise RequestError(400, text)
    return _number(body, "max_completion_tokens") or _number(body, "max_tokens")


def _check_stream(body: Mapping[str, Any]) -> None:
    """Refuses options of a stream that are none, before an answer is sampled."""
    if not isinstance(options := body.get("stream_options") or {}, dict):
        text = f"stream_options={json.dumps(options)[:200]}: an object is needed, or leave it out"
        raise RequestError(400, text)


def _tools_of(body: Mapping[str, Any]) -> Any:
    """The tools of a request; None where it may call none."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        text = (
            f"tool_choice={json.dumps(choice)[:200]} is not supported: the policy decides, 'auto'"
        )
        raise RequestError(400, text)
    return None if choice == "none" else body.get("tools")


def _token_request(body: Mapping[str, Any], eos_ids: Any) -> tuple[list[int], int | None]:
    """The ids and the limit on new tokens of a request of the token route."""
    ids, options = body.get("token_ids"), body.get("sampling_params") or {}
    whole = isinstance(ids, list) and all(type(token) is int for token in ids)
    if not whole or not isinstance(options, dict):
        text = "token_ids: a list of token ids, and sampling_params: an object, are needed"
        raise RequestError(400, text)
    assert isinstance(ids, list)
    if body.get("features") or body.get("images") or body.get("multi_modal_data"):
        raise RequestError(400, "images are not supported: the policy reads text")
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 31:
        raise RequestError(400, f"token_ids has ids from {min(ids)} to {max(ids)}")
    _refuse(options, _ONE_ANSWER, _ONE_ANSWER_REMEDY)
    ends = options.get("stop_token_ids") or []
    if not isinstance(ends, list) or not set(map(str, ends)) <= set(map(str, eos_ids)):
        raise RequestError(
            400,
            f"stop_token_ids={json.dumps(ends)[:200]}: a turn of the policy ends with "
            f"{', '.join(map(str, eos_ids))}, send no other ids",
        )
    return ids, _number(options, "max_tokens")


def _error(error: RequestError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def _logprobs(turn: Asked, name: Callable[[int], str]) -> dict[str, Any]:
    content = [
        {
            "token": name(token),
            "logprob": logprob if math.isfinite(logprob) else _LOWEST_LOGPROB,
            "bytes": None,
            "top_logprobs": [],
        }
        for token, logprob in zip(turn.ids, turn.logprobs, strict=True)
    ]
    return {"content": content}


def _token_name(token: int) -> str:
    return f"token_id:{token}"


def _token_response(turn: Asked) -> dict[str, Any]:
    choice = {
        "index": 0,
        "token_ids": turn.ids,
        "finish_reason": "stop" if turn.complete else "length",
        "logprobs": _logprobs(turn, _token_name),
    }
    return {"request_id": _id_of(turn), "choices": [choice], "prompt_logprobs": None}


def _id_of(turn: Asked) -> str:
    return f"{turn.row.session.id}-{turn.order}"


def _chat_response(
    turn: Asked, message: Mapping[str, Any], body: Mapping[str, Any]
) -> dict[str, Any]:
    """The answer of the chat route, with vLLM's token ids where they are asked for."""
    reason = "length"
    if turn.complete:
        reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reason}
    choice["logprobs"] = _logprobs(turn, _token_name) if body.get("logprobs") else None
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{_id_of(turn)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": turn.start,
            "completion_tokens": len(turn.ids),
            "total_tokens": turn.end,
        },
    }
    if body.get("return_token_ids"):
        answer["prompt_token_ids"] = turn.row.ids[: turn.start]
        choice["token_ids"] = turn.ids
    return answer


def _events(answer: Mapping[str, Any], body: Mapping[str, Any]) -> bytes:
    """An answer as the server-sent events of `stream`."""
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [call | {"index": number} for number, call in enumerate(calls)]
    same = {name: answer[name] for name in ("id", "created", "model")}
    same["object"] = "chat.completion.chunk"
    first = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks = [same | {"choices": [first]}, same | {"choices": [last]}]
    if "prompt_token_ids" in answer:
        chunks[0]["prompt_token_ids"] = answer["prompt_token_ids"]
        first["token_ids"] = choice["token_ids"]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(same | {"choices": [], "usage": answer["usage"]})
    data = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
    return "".join(f"data: {one}\n\n" for one in data).encode()
