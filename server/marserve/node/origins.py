"""Object stores as a node reads them: the server says where they are, the node has credentials of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marserve.agent_link import StoreAt
from marserve.settings.stores import SCHEMES, StoreOptions, Stores
from marserve.store.addresses.fetch_guard import OBJECT_SCHEMES, Target
from marserve.store.sources.object_store import ObjectStores
from marserve.store.sources.source import Failed, Opener, Source

# A store, or a source of credentials, that is silent for so long is given up: the server has the archive as well.
SILENCE_S = 5.0


def origins(stores: Sequence[StoreAt], environment: Mapping[str, str]) -> dict[str, Opener]:
    """The openers of object stores' addresses, by scheme. A store that needs secrets of the server is refused."""
    known = Stores(tuple(StoreOptions(SCHEMES[each.kind], each.prefix, each.options) for each in stores))
    secret = {each.prefix for each in stores if each.has_secrets}
    objects = ObjectStores(known, environment, silence_s=SILENCE_S)

    def open_here(target: Target) -> Source:
        if known.choose(SCHEMES[target.scheme], target.url).prefix in secret:
            raise Failed("the server alone has its credentials")
        return objects.open(target)

    return dict.fromkeys(OBJECT_SCHEMES, open_here)
