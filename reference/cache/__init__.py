"""The KV cache: pages, the sequences they hold, reuse of prefixes, and files (SPEC 11)."""

from reference.cache.pages import PAGE_SIZE, KVType, LayerPages, PagePool, PageShape
from reference.cache.sequence import KVCache, LayerView

__all__ = ["PAGE_SIZE", "KVCache", "KVType", "LayerPages", "LayerView", "PagePool", "PageShape"]
