"""The KV cache: pages, sequences of them, what is reused of them, and files of them (SPEC 11)."""

from reference.cache.pages import PAGE_SIZE, KVType, LayerPages, PagePool, PageShape
from reference.cache.sequence import KVCache, LayerView

__all__ = ["PAGE_SIZE", "KVCache", "KVType", "LayerPages", "LayerView", "PagePool", "PageShape"]
