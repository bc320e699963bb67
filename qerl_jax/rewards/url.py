"""A reward that a server computes: one POST for the completions of a rollout.

The request is a JSON object of lists with one element for each completion, and the columns of the
rows under their names:

    {"prompts": [...], "completions": [...], "answers": [...], "num_tokens": [...],
     "finished": [...], "columns": {"tests": [...]}}

Values of columns that JSON does not have are sent as `json_value` says.

The answer is a JSON list with one number for each completion, or {"rewards": [...]}. Any other
status than 200, other JSON, another length, null and numbers that are not finite make rewards
missing. A request that does not reach the server, or that the server refuses for the moment, is
repeated. Redirects are not followed: the token would go to another host.
"""

import asyncio
import base64
import dataclasses
import datetime
import decimal
import ipaddress
import json
import math
import os
import re
import types
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.errors import UserError, first_line, visible
from qerl_jax.rewards.functions import LARGEST

_BUSY = (408, 425, 429, 500, 502, 503, 504)  # statuses after which a request is repeated
_FIRST_PAUSE = 0.5  # seconds before the second attempt; each further pause is twice as long
_MOST_BYTES = 16 << 20  # of an answer


class RewardError(Exception):
    """Why a reward is missing; the message says it all, without the name of a class."""


class _BusyError(RewardError):
    """A failure that the next attempt may not have."""


# Words of the names of parameters whose values are secrets.
_SECRET_WORDS = frozenset(
    {"key", "apikey", "accesskey", "secretkey", "privatekey", "authkey", "subscriptionkey"}
    | {"token", "accesstoken", "authtoken", "sessiontoken", "securitytoken", "sastoken", "jwt"}
    | {"secret", "clientsecret", "sig", "signature", "hmac", "bearer", "credential", "credentials"}
    | {"password", "passwd", "pass", "pwd", "passphrase", "auth", "authorization", "code", "otp"}
)


def is_key(name: str) -> bool:
    """Returns whether a parameter of a URL holds a secret, by its name, such as 'api_key'."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)  # accessToken
    words = re.split(r"[\W_]+", spaced.lower())
    return not _SECRET_WORDS.isdisjoint((*words, "".join(words)))


def without_keys(text: str) -> str:
    """Returns a text with `***` in place of the secrets in its URLs.

    A reward may hold none, but the command line of a program that calls `train` may.
    """
    text = re.sub(r"(?<=://)[^\s/\"'@]+@", "***@", text)

    def mask(parameter: re.Match[str]) -> str:
        name = urllib.parse.unquote_plus(parameter[2])
        return f"{parameter[1]}{parameter[2]}=***" if is_key(name) else parameter[0]

    return re.sub(r"([?&;])([^\s=&;?\"']+)=([^\s&;#\"'\\]+)", mask, text)


def _parameters(query: str) -> list[str]:
    pairs = urllib.parse.parse_qsl(query.replace(";", "&"), keep_blank_values=True)
    return [name for name, _ in pairs]


def json_value(value: Any) -> Any:
    """Returns a value of a column as JSON has it.

    Numbers that are not finite become null; times and dates texts of ISO 8601, durations seconds,
    bytes base64, decimal numbers and UUIDs their text, arrays lists, and an environment an object
    with its attributes.

    Raises:
        TypeError: there is no such form of the value, or of a part of it; the message is its type.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [json_value(part) for part in value]
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {str(key): json_value(part) for key, part in value.items()}
    if isinstance(value, datetime.date | datetime.time):  # A datetime is a date.
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal):
        return str(value) if value.is_finite() else None
    if isinstance(value, uuid.UUID):
        return str(value)
    raise TypeError(type(value).__name__)


def check_json(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuses rows with a value that a reward by URL cannot send."""
    for number, row in enumerate(rows, 1):
        for column, value in row.items():
            try:
                json_value(value)
            except TypeError as error:
                raise UserError(
                    f"reward {name!r} sends all columns to its server, and JSON has no form of the "
                    f"type {error} in the column {column!r} of problem {number}: take the column "
                    "out, or make it text"
                ) from error


def is_url(text: str) -> bool:
    """Returns whether a reward is named by a URL and not by an import path."""
    return "://" in text


@dataclasses.dataclass(frozen=True)
class UrlReward:
    """A reward that is asked for by HTTP; it is called like an async function that takes lists.

    Attributes:
        url: address, http or https, without a user name, a password, or a parameter that `is_key`.
        retries: number of further attempts where the server cannot be reached or is busy.
        token_env: name of the environment variable with a token, which is sent as
            `Authorization: Bearer TOKEN`; '' sends none. The token itself is read at each call and
            is kept nowhere.

    Raises:
        UserError: the URL or the name of the variable is malformed.
    """

    url: str
    retries: int = 2
    token_env: str = ""

    def __post_init__(self):
        needed = "http://HOST:PORT/PATH is needed"
        try:
            parts = urllib.parse.urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError as error:
            raise UserError(f"a reward has a URL that cannot be read: {needed}") from error
        if parts.username is not None or parts.password is not None:
            # The message leaves out the URL, which holds the secret.
            raise UserError(
                f"the reward at {parts.hostname} has a user name or a password in its URL, which "
                "would be saved in config.json: pass a token by token_env=VARIABLE"
            )
        if key := next(filter(is_key, _parameters(parts.query)), None):
            raise UserError(
                f"the reward at {parts.hostname} has the parameter {key!r} in its URL, which would "
                "be saved in config.json: pass a key by token_env=VARIABLE"
            )
        if parts.fragment:
            raise UserError(
                f"the reward at {parts.hostname} has a fragment, '#...', in its URL, which is sent "
                "to no server but saved in config.json: leave it out"
            )
        if not valid:
            raise UserError(f"reward {self.url!r}: not a URL, {needed}")
        if self.token_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.token_env):
            raise UserError(
                f"reward {self.url!r}: token_env is the name of an environment variable, not the "
                "token itself"
            )

    def token(self) -> str:
        """Returns the token, '' without one.

        Raises:
            UserError: the variable is not set, or does not hold a token.
        """
        if not self.token_env:
            return ""
        token = os.environ.get(self.token_env, "").strip()
        if not re.fullmatch(r"[\x21-\x7e]+", token):
            raise UserError(
                f"reward {self.url!r}: the environment variable that its token_env names is not "
                "set, or is no token of visible ASCII characters; export it before the start"
            )
        return token

    async def __call__(
        self,
        /,
        prompts: list[str],
        completions: list[str],
        answers: list[str],
        num_tokens: list[int],
        finished: list[bool],
        **columns: list[Any],
    ) -> list[Any]:
        """Returns a number for each completion, or a RewardError in its place.

        Raises:
            RewardError: the server gave no answer, or one that cannot be used.
        """
        import httpx2

        body: dict[str, Any] = {
            "columns": {},
            "prompts": prompts,
            "completions": completions,
            "answers": answers,
            "num_tokens": num_tokens,
            "finished": finished,
        }
        for column, values in columns.items():
            try:
                body["columns"][column] = json_value(values)
            except TypeError as error:
                message = f"JSON has no form of the type {error} in the column {column!r}"
                raise RewardError(message) from error
        content = json.dumps(body, allow_nan=False).encode()
        failure: RewardError | None = None
        # The caller bounds the call as a whole; no part of it has a time limit of its own.
        async with httpx2.AsyncClient(timeout=None, trust_env=not self._is_local()) as client:
            for attempt in range(self.retries + 1):
                try:
                    if attempt:
                        await asyncio.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
                    return _read(await self._post(client, content), len(completions))
                except _BusyError as error:
                    failure = error
                except asyncio.CancelledError:
                    if failure is None:
                        raise
                    raise RewardError(f"{failure}; then its time limit ended") from failure
        attempts = f" (attempts: {self.retries + 1})" if self.retries else ""
        raise RewardError(f"{failure}{attempts}") from failure

    def _is_local(self) -> bool:
        """Whether the server runs on this machine, which no proxy of the environment reaches."""
        host = urllib.parse.urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    async def _post(self, client: Any, content: bytes) -> bytes:
        import httpx2

        token = self.token()
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        body = bytearray()
        try:
            request = client.stream("POST", self.url, content=content, headers=headers)
            async with request as response:
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > _MOST_BYTES:
                        raise RewardError(f"its answer has more than {_MOST_BYTES >> 20} MB")
        except httpx2.TransportError as error:
            reason = _clean(first_line(error) or type(error).__name__, token)
            raise _BusyError(f"cannot reach the server: {reason}") from error
        except httpx2.HTTPError as error:
            raise RewardError(
                _clean(f"{type(error).__name__}: {first_line(error)}", token)
            ) from error
        status = response.status_code
        if status == 200:
            return bytes(body)
        if 300 <= status < 400:
            raise RewardError(f"status {status}: redirects are not followed, pass the final URL")
        text = _clean(body.decode(errors="replace"), token)
        kind = _BusyError if status in _BUSY else RewardError
        raise kind(f"status {status}{': ' if text else ''}{text}")


def _clean(text: str, token: str) -> str:
    """The beginning of a text from outside, on one line, without the token."""
    if token:
        text = text.replace(token, "***")
    return visible(" ".join(text.split()))[:200]


def _read(content: bytes, count: int) -> list[Any]:
    """Reads an answer: numbers, and RewardErrors in place of what is none."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RewardError("its answer is not JSON") from error
    if isinstance(answer, dict):
        answer = answer.get("rewards")
    if not isinstance(answer, list):
        raise RewardError('its answer is neither a JSON list nor {"rewards": [...]}')
    if len(answer) != count:
        raise RewardError(f"its answer has {len(answer)} rewards for {count} completions")
    return [_number(value) for value in answer]


def _number(value: Any) -> float | RewardError:
    if value is None:
        return RewardError("its answer is null")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return RewardError(f"its answer is a {type(value).__name__}, not a number")
    if not abs(value) <= LARGEST:
        return RewardError("its answer is not a finite number")
    return float(value)
