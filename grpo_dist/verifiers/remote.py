"""Asking a server for JSON, a bounded number of times: what the verifiers that are not on this machine share.

A refused connection, a slow answer, 408, 429, 5xx and an answer that is no JSON are tried again after a growing pause;
any other status is not, since it would stay the same. Whatever remains is raised, so the sample is masked, not zeroed.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_AGAIN = {408, 409, 425, 429}
_MOST_BYTES = 4 << 20
_PAUSE = 0.25  # seconds before the second try; doubled each time

Answer = TypeVar("Answer")


class RemoteError(Exception):
    """The server gave no usable answer; the message says what it said last, never what was sent."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key in a header must not follow to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def ask(
    url: str,
    body: Mapping[str, Any],
    read: Callable[[Any], Answer],
    *,
    headers: Mapping[str, str],
    tries: int,
    seconds: float,
) -> Answer:
    """POST ``body`` and give what ``read`` makes of the JSON answer.

    Args:
        read: raises ValueError, KeyError, TypeError or IndexError for an answer of the wrong shape: it is asked again.
        seconds: for all tries together.

    Raises:
        RemoteError: after the last try.
    """
    end = time.monotonic() + seconds
    said = "no answer"
    for attempt in range(tries):
        left = end - time.monotonic()
        if left <= 0:
            break
        try:
            return read(_post(url, body, headers, left / (tries - attempt)))
        except urllib.error.HTTPError as error:
            said = f"status {error.code}"
            error.close()
            if error.code not in _AGAIN and error.code < 500:
                break
        except (OSError, http.client.HTTPException) as error:  # URLError and time-outs are OSErrors
            said = str(getattr(error, "reason", error)) or type(error).__name__
        except (ValueError, KeyError, TypeError, IndexError) as error:
            said = f"an answer of the wrong shape ({type(error).__name__}: {str(error)[:100]})"
        pause = _PAUSE * 2**attempt
        if attempt + 1 < tries and time.monotonic() + pause < end:
            time.sleep(pause)
    raise RemoteError(f"{url} gave no verdict in {attempt + 1} of {tries} tries: {said}")


def _post(url: str, body: Mapping[str, Any], headers: Mapping[str, str], seconds: float) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}, method="POST"
    )
    opener = urllib.request.build_opener(_NoRedirect)
    with opener.open(request, timeout=max(seconds, 0.05)) as answer:
        data = answer.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES} bytes")
    return json.loads(data)
