"""What an address says, and whether it may be used.

fetch_guard     which addresses may be fetched from
object_address  addresses of object stores, in the one form that counts
pinned_digest   SHA-256 digests in addresses and beside archives
"""
