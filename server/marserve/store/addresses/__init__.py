"""Reads addresses, and decides whether they may be used.

fetch_guard     which addresses may be fetched from
object_address  addresses of object stores in their normal form
pinned_digest   SHA-256 digests in addresses and beside archives
"""
