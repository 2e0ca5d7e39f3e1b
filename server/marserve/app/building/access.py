"""Makes keys and certificates by the settings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.routing import Router
from starlette.types import ASGIApp, Scope

from marserve.api.browsers import OPEN_PATHS, BrowserRules, OwnHosts
from marserve.api.certificate_expiry import expiry_warning
from marserve.api.rest.guard import BrowserGuard, Guard
from marserve.api.rest.only_here import KeylessUploads, OnlyHere
from marserve.api.rest.platforms.health import PROBES
from marserve.api.tls import Identity, make_up_identity, read_keystore, read_pem_files, server_context
from marserve.api.tokens import Access, CannotKeepTokens, Kind, Tokens
from marserve.app.building.cannot_start import CannotStart
from marserve.errors import InvalidToken
from marserve.settings import Address, Settings
from marserve.settings.open_management import shares_its_port

log = logging.getLogger("marserve.app")

# The access of routes if inference is open. Routes that take either key are open then too.
_OPEN_INFERENCE: dict[Access, Access] = {"inference": "unprotected", "either": "unprotected"}


@dataclass(frozen=True, slots=True)
class AccessControl:
    """The keys of clients (None if tokens are off) and the TLS of https addresses (None without such addresses)."""

    settings: Settings
    tokens: Tokens | None
    tls: ssl.SSLContext | None

    def guard(
        self, routers: Sequence[tuple[Router, Access]], otherwise: Access, rules: BrowserRules
    ) -> Callable[[ASGIApp], ASGIApp]:
        """Wraps a listener's application to check keys or the caller's machine. `rules` judge those without a key."""
        settings, tokens = self.settings, self.tokens
        if tokens is None:
            only_here = self._only_here(routers)
            return lambda app: BrowserGuard(app if only_here is None else only_here(app), rules)
        if settings.allow_open_inference:
            routers = [(router, _OPEN_INFERENCE.get(access, access)) for router, access in routers]
            otherwise = _OPEN_INFERENCE.get(otherwise, otherwise)
        pings = ("/ping", settings.health_route or "/ping") if settings.allow_open_ping else ()
        open_paths = (*PROBES, *pings)
        answers_preflight = bool(settings.cors_allowed_origin)
        return lambda app: Guard(
            app, tokens, routers, otherwise, open_paths, answers_preflight=answers_preflight, browser_rules=rules
        )

    def browser_rules(self, address: Address, names: Sequence[str], *, is_here: bool) -> BrowserRules:
        """The rules for browsers at an address with these APIs, for routes without a key.

        `is_here`: only this machine reaches the address, so its names are known.
        """
        # As recorded, TorchServe answers predictions whatever the Host.
        keeps_to_names = is_here and (self.settings.entry == "marserve" or "Management" in names)
        own_hosts = self._own_hosts(address) if keeps_to_names or self.settings.allowed_hosts else None
        return self._rules(address, own_hosts)

    def upload_check(self) -> Callable[[Scope], None]:
        """Raises what refuses a caller of an upload; with keys the guard of the listener has checked his."""
        if self.tokens is not None:
            return _let_pass
        address = self.settings.management_address
        scheme = "https" if address.is_tls else "http"
        elsewhere = BrowserRules(scheme) if self.settings.allow_uploads == "true" else None
        return KeylessUploads(BrowserRules(scheme, self._own_hosts(address)), elsewhere).check

    def _own_hosts(self, address: Address) -> OwnHosts:
        return OwnHosts(self.settings.allowed_hosts, address.host)

    def _rules(self, address: Address, own_hosts: OwnHosts | None) -> BrowserRules:
        settings = self.settings
        further = [settings.health_route] if settings.health_route else []
        return BrowserRules(
            "https" if address.is_tls else "http",
            own_hosts,
            settings.cors_origins,
            [*OPEN_PATHS, *further],
        )

    @property
    def inference_tokens(self) -> Tokens | None:
        """The keys for predictions; None if they need none."""
        return None if self.settings.allow_open_inference else self.tokens

    def _only_here(self, routers: Sequence[tuple[Router, Access]]) -> Callable[[ASGIApp], ASGIApp] | None:
        """Restricts management to this machine where other APIs are; None if it is not to be restricted."""
        settings = self.settings
        is_shared = shares_its_port(settings) or settings.open_inference_control
        if not settings.management_is_kept_here or not is_shared:
            return None
        closed = [router for router, access in routers if access == "management"]
        rules = self._rules(self.settings.management_address, self._own_hosts(self.settings.management_address))
        return (lambda app: OnlyHere(app, closed, rules)) if closed else None

    def authorize(self, kind: Kind) -> Callable[[str | bytes | None], None] | None:
        """A check for the key of this kind; None if none is needed."""
        tokens = self.inference_tokens if kind == "inference" else self.tokens
        return None if tokens is None else lambda value: tokens.check(kind, value)

    def has_key(self, access: Access, value: str | bytes | None) -> bool:
        """Whether this value of `Authorization` opens routes with that access; without keys everything does."""
        if self.tokens is None or access == "open":
            return True
        try:
            if access in ("inference", "management"):
                self.tokens.check(access, value)
            else:
                self.tokens.check_either(value)
        except InvalidToken:
            return False
        return True

    async def write_tokens(self, stack: contextlib.AsyncExitStack) -> None:
        """Write the file with the keys; it is removed when `stack` ends. Raises CannotStart.

        Called after the ports are bound, so that a server that cannot start leaves another server's file alone.
        """
        if self.tokens is None:
            return
        try:
            await asyncio.to_thread(self.tokens.write)
        except CannotKeepTokens as error:
            raise CannotStart(str(error)) from error
        stack.callback(self.tokens.remove)
        log.info("Tokens are on: clients find their keys in %s", self.settings.token_file)


def _let_pass(scope: Scope) -> None:
    """The check of uploads where each request has a key."""


async def prepare_access(settings: Settings) -> AccessControl:
    """Make the keys of clients and the TLS of https addresses, if the settings want them. Raises BadSettings."""
    tokens = None
    if not settings.disable_token_authorization:
        lifetime_s = settings.token_expiration_min * 60
        is_ours = settings.entry == "marserve"
        tokens = Tokens(settings.token_file, lifetime_s, takes_any_case=is_ours, tells_apart=is_ours)
    identity = await asyncio.to_thread(listeners_identity, settings)
    tls = server_context(identity) if identity is not None else None
    if identity is not None:
        _warn_of_expiry(identity, "https addresses")
    return AccessControl(settings, tokens, tls)


def listeners_identity(settings: Settings) -> Identity | None:
    """Certificate and key of https addresses; None without such addresses. Raises BadSettings.

    As in TorchServe: the keystore if one is named, else the PEM files, else a new certificate that signs itself.
    """
    addresses = [settings.inference_address, settings.management_address, settings.metrics_address]
    hosts = [address.host for address in addresses if address.is_tls]
    if not hosts:
        return None
    if settings.keystore is not None:
        return read_keystore(settings.keystore, settings.keystore_pass, settings.keystore_type)
    if settings.certificate_file is not None and settings.private_key_file is not None:
        return read_pem_files(settings.certificate_file, settings.private_key_file)
    return make_up_identity(dict.fromkeys([*hosts, "localhost", "127.0.0.1", socket.gethostname()]))


def _warn_of_expiry(identity: Identity, what: str) -> None:
    warning = expiry_warning(identity.chain_pem, what, datetime.now(UTC))
    if warning is not None:
        log.warning("%s", warning)


def grpc_identity(settings: Settings) -> Identity | None:
    """Certificate and key of the gRPC ports; None if they are not encrypted. Raises BadSettings."""
    if not settings.enable_grpc_ssl:
        return None
    assert settings.certificate_file is not None
    assert settings.private_key_file is not None
    identity = read_pem_files(settings.certificate_file, settings.private_key_file)
    server_context(identity)  # raises with a reason
    _warn_of_expiry(identity, "gRPC ports")
    return identity
