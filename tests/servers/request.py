# SPDX-License-Identifier: Apache-2.0
"""Prompts, and what a router does with one: the same request to the prefill and to the decode."""
from __future__ import annotations

import concurrent.futures
import json
import random
import urllib.error
import urllib.request
from typing import Any, Optional

LOCAL = "127.0.0.1"
FIRST_ORDINARY_TOKEN, VOCABULARY = 3, 512


class RequestFailed(Exception):
    """A server answered with an error, or not in time."""


def prompt(tokens: int) -> list[int]:
    """Random token ids, the same each time for one length."""
    chooser = random.Random(tokens)
    return [chooser.randrange(FIRST_ORDINARY_TOKEN, VOCABULARY) for _ in range(tokens)]


def _post(port: int, body: dict[str, Any], timeout: float) -> dict[str, Any]:
    request = urllib.request.Request(f"http://{LOCAL}:{port}/generate", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise RequestFailed(f"status {error.code}: {error.read().decode(errors='replace')[:500]}") from error
    except TimeoutError as error:
        raise RequestFailed(f"no answer within {timeout:.0f} s") from error
    except OSError as error:
        raise RequestFailed(f"no connection to port {port}: {error}") from error


def generate(port: int, tokens: list[int], new_tokens: int, timeout: float, prefill_port: Optional[int] = None,
             bootstrap_port: Optional[int] = None, room: Optional[int] = None) -> list[int]:
    """Greedy tokens from a plain server, or from a decode together with its prefill."""
    body: dict[str, Any] = {"input_ids": tokens, "sampling_params": {
        "temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}}
    if prefill_port is None:
        return list(_post(port, body, timeout)["output_ids"])
    body.update(bootstrap_host=LOCAL, bootstrap_port=bootstrap_port, bootstrap_room=room)
    with concurrent.futures.ThreadPoolExecutor(2) as both:
        prefilled = both.submit(_post, prefill_port, body, timeout)
        decoded = both.submit(_post, port, body, timeout)
        errors = []
        for role, answer in (("decode", decoded), ("prefill", prefilled)):
            try:
                answer.result()
            except RequestFailed as error:
                errors.append(f"{role}: {error}")
    if errors:
        raise RequestFailed("; ".join(errors))
    return list(decoded.result()["output_ids"])
