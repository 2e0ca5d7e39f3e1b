"""Both clients behind one face: each claim about the wire is tested with both."""

from __future__ import annotations

import asyncio
from typing import Any

from marserve_client import AsyncClient, Client


class Asking:
    """A client whose methods are called by name; streams are read to their end, or for so many items."""

    def __init__(self, client: Client | AsyncClient, runner: asyncio.Runner | None) -> None:
        self.client, self._runner = client, runner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        if self._runner is None:
            return method

        def call(*arguments: Any, **keywords: Any) -> Any:
            assert self._runner is not None
            return self._runner.run(method(*arguments, **keywords))

        return call

    def items(self, name: str, *arguments: Any, most: int | None = None, **keywords: Any) -> list[Any]:
        """Of a stream; the first so many of them, and then it is closed. Its error has them as `came`."""
        found: list[Any] = []

        def enough() -> bool:
            return most is not None and len(found) >= most

        async def read() -> None:
            async with await getattr(self.client, name)(*arguments, **keywords) as stream:
                async for item in stream:
                    found.append(item)
                    if enough():
                        break

        try:
            if self._runner is not None:
                self._runner.run(read())
            else:
                with getattr(self.client, name)(*arguments, **keywords) as stream:
                    for item in stream:
                        found.append(item)
                        if enough():
                            break
        except Exception as error:
            error.came = found  # type: ignore[attr-defined]
            raise
        return found


class Clients:
    """Makes clients of one kind, and closes them."""

    def __init__(self, kind: str) -> None:
        self.is_async = kind == "async"
        self._runner = asyncio.Runner() if self.is_async else None
        self._made: list[Asking] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> Asking:
        """A client with these arguments of its class."""
        kind = AsyncClient if self.is_async else Client
        asking = Asking(kind(*arguments, **keywords), self._runner)
        self._made.append(asking)
        return asking

    def close(self) -> None:
        """Close all."""
        for asking in self._made:
            asking.aclose() if self.is_async else asking.close()
        if self._runner is not None:
            self._runner.close()
