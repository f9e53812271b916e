"""Ray's dashboard over HTTP: the Jobs API, uploads and logs. Every call has a limit and carries its own token.

Ray's own client is not used: it lets RAY_ADDRESS and RAY_API_SERVER_ADDRESS replace the address it is given, has no
time limits, and takes the token from the process's environment. The requests are the documented ones of the Jobs API.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp
import requests

from grpo_dist.errors import UserError
from grpo_dist.submit.backend import Unreachable

SECONDS = 15  # limit of one request


class RayApi:
    """One cluster's dashboard."""

    def __init__(self, address: str, token: str | None) -> None:
        self.address = address
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def version(self) -> str:
        """The Ray version of the cluster; the cheapest call that needs the token."""
        return str(self._json("GET", "/api/version")["ray_version"])

    def submit(self, body: dict[str, Any]) -> str:
        return str(self._json("POST", "/api/jobs/", json=body)["submission_id"])

    def job(self, job: str) -> dict[str, Any] | None:
        """Everything known of a job, None when there is no such one."""
        answer = self._request("GET", f"/api/jobs/{job}")
        if answer.status_code == 404:
            return None
        found: dict[str, Any] = self._checked(answer).json()
        return found

    def jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._json("GET", "/api/jobs/")
        return found

    def stop(self, job: str) -> None:
        self._json("POST", f"/api/jobs/{job}/stop")

    def log(self, job: str) -> str:
        """Everything the driver has written so far."""
        return str(self._json("GET", f"/api/jobs/{job}/logs")["logs"])

    def upload(self, data: bytes) -> str:
        """Put a zip file into the cluster; its URI, which is the same for the same bytes."""
        name = f"_ray_pkg_{hashlib.sha256(data).hexdigest()[:32]}.zip"
        if self._request("GET", f"/api/packages/gcs/{name}").status_code != 200:
            self._checked(self._request("PUT", f"/api/packages/gcs/{name}", data=data, seconds=300))
        return f"gcs://{name}"

    def tail(self, job: str, ended: Callable[[], bool]) -> Iterator[str]:
        """Text of the driver as it comes, to the end of the job; a broken connection is made again without a gap.

        Ray closes the stream of a failed job like that of a finished one, and now and then before the end: only
        ``ended`` says that it is over.
        """
        seen = 0
        while True:
            over = ended()  # asked before reading: what was written until then is read below
            skip = seen
            for text in self._stream(
                lambda session: _socket(session, f"{self.address}/api/jobs/{job}/logs/tail"), ended
            ):
                if skip >= len(text):
                    skip -= len(text)
                    continue
                yield text[skip:]
                seen += len(text) - skip
                skip = 0
            if over:
                rest = self.log(job)[seen:]
                if rest:
                    yield rest
                return

    def worker_log(
        self, node_ip: str, pid: int, suffix: str, ended: Callable[[], bool], *, follow: bool
    ) -> Iterator[str]:
        """Output of one worker process, by the node it lives on and its pid."""
        of = {"pid": pid, "suffix": suffix, "lines": -1, "timeout": SECONDS}
        query = urlencode(of | self._node_with_log(node_ip, of))
        if not follow:
            yield self._checked(self._request("GET", f"/api/v0/logs/file?{query}")).text
            return
        url = f"{self.address}/api/v0/logs/stream?{query}"
        yield from self._stream(lambda session: _lines(session, url), ended)

    # ---- plumbing

    def _node_with_log(self, node_ip: str, of: Mapping[str, Any]) -> dict[str, str]:
        """How to name the node in a query: several nodes may share an address, on a machine that is cut into nodes."""
        found = self._json("GET", "/api/v0/nodes?limit=10000")["data"]["result"]["result"]
        ids = [node["node_id"] for node in found if node["node_ip"] == node_ip and node["state"] == "ALIVE"]
        for node in ids if len(ids) > 1 else []:
            query = urlencode({**of, "lines": 1, "node_id": node})
            if self._request("GET", f"/api/v0/logs/file?{query}").status_code == 200:
                return {"node_id": node}
        return {"node_ip": node_ip}

    def _stream(
        self, source: Callable[[aiohttp.ClientSession], AsyncIterator[str]], ended: Callable[[], bool]
    ) -> Iterator[str]:
        """Texts of an asynchronous source, until it closes, breaks, or is silent after the end."""
        loop = asyncio.new_event_loop()
        waiting: asyncio.Task[str] | None = None
        session: aiohttp.ClientSession | None = None
        try:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=SECONDS)
            session = loop.run_until_complete(_session(self._headers, timeout))
            texts = aiter(source(session))
            while True:
                waiting = waiting or loop.create_task(_next(texts))
                done, _ = loop.run_until_complete(asyncio.wait({waiting}, timeout=2))
                if not done:
                    if ended():
                        break
                    continue
                try:
                    text = waiting.result()
                except (StopAsyncIteration, aiohttp.ClientError, OSError):
                    break
                waiting = None
                yield text
        finally:
            if waiting is not None:
                waiting.cancel()
                loop.run_until_complete(asyncio.wait({waiting}))
            if session is not None:
                loop.run_until_complete(session.close())
            loop.close()

    def _json(self, method: str, path: str, **options: Any) -> Any:
        return self._checked(self._request(method, path, **options)).json()

    def _request(self, method: str, path: str, *, seconds: float = SECONDS, **options: Any) -> requests.Response:
        try:
            return requests.request(
                method,
                self.address + path,
                headers=self._headers,
                timeout=(5, seconds),
                allow_redirects=False,
                **options,
            )
        except requests.RequestException as error:
            raise Unreachable(
                f"no Ray dashboard answers at {self.address}: {_cause(error)}\n"
                "  is the head up, its dashboard bound to an address that can be reached from here, the tunnel open?"
            ) from error

    def _checked(self, answer: requests.Response) -> requests.Response:
        if answer.status_code in (401, 403):
            have = "the token is not the cluster's" if self._headers else "no token was sent"
            raise UserError(
                f"the cluster at {self.address} refuses: {have}. Copy the file that the head node uses "
                "(RAY_AUTH_TOKEN_PATH there) and name it in ray.token, or in RAY_AUTH_TOKEN_PATH here"
            )
        if answer.status_code == 413:
            raise UserError("the dashboard refuses an upload of this size: exclude files (ray.excludes)")
        if answer.status_code >= 400:
            raise Unreachable(f"{self.address} answers {answer.status_code}: {answer.text.strip()[-500:]}")
        return answer


async def _next(texts: AsyncIterator[str]) -> str:
    return await anext(texts)


async def _session(headers: dict[str, str], timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers=headers, timeout=timeout)


async def _socket(session: aiohttp.ClientSession, url: str) -> AsyncIterator[str]:
    async with session.ws_connect(url, heartbeat=30, max_msg_size=0) as socket:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            yield message.data


async def _lines(session: aiohttp.ClientSession, url: str) -> AsyncIterator[str]:
    async with session.get(url) as answer:
        if answer.status != 200:
            yield f"[no log: {(await answer.text()).strip()[-300:]}]\n"
            return
        async for data in answer.content.iter_any():
            yield data.decode(errors="replace")


def _cause(error: BaseException) -> str:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return str(error)


def whole_lines(texts: Iterator[str]) -> Iterator[str]:
    """Pieces of text as lines."""
    left = ""
    for text in texts:
        *lines, left = (left + text).split("\n")
        yield from lines
    if left:
        yield left
