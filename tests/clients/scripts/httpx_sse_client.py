"""A model's Server-Sent Events as httpx-sse reads them, as JSON: a whole stream, one that fails, one left early.

httpx_sse_client.py INFERENCE
"""

import asyncio
import json
import sys

import httpx
from httpx_sse import aconnect_sse, connect_sse

url = f"{sys.argv[1]}/predictions/words"


def read(text):
    """The events of one stream."""
    with httpx.Client() as client, connect_sse(client, "POST", url, content=text) as source:
        return [[event.event, event.data, event.id] for event in source.iter_sse()]


async def leave_early():
    """The first event of a long stream."""
    async with httpx.AsyncClient() as client, aconnect_sse(client, "POST", url, content="word " * 1000) as source:
        async for event in source.aiter_sse():
            return [event.event, event.data, event.id]
    return None


print(json.dumps({"whole": read("one two"), "failed": read("one fail two"), "left": asyncio.run(leave_early())}))
