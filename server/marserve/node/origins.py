"""Object stores as a node reads them: where they are is the server's word, credentials are the node's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marserve.agent_link import StoreAt
from marserve.settings.stores import SCHEMES, StoreOptions, Stores
from marserve.store.addresses.fetch_guard import Target
from marserve.store.sources.object_store import ObjectStores
from marserve.store.sources.source import Failed, Opener, Source

# A store, or whoever gives out credentials, that says nothing for so long: the server has the archive as well.
SILENCE_S = 5.0


def origins(stores: Sequence[StoreAt], environment: Mapping[str, str]) -> dict[str, Opener]:
    """What opens addresses of object stores, by their scheme; those with secrets of the server's are refused."""
    told = Stores(tuple(StoreOptions(SCHEMES[each.kind], each.prefix, each.options) for each in stores))
    secret = {each.prefix for each in stores if each.has_secrets}
    objects = ObjectStores(told, environment, silence_s=SILENCE_S)

    def open_here(target: Target) -> Source:
        if told.choose(SCHEMES[target.scheme], target.url).prefix in secret:
            raise Failed("the server alone has its credentials")
        return objects.open(target)

    return dict.fromkeys(("s3", "gs", "az"), open_here)
