"""The executable specification of LLM inference: read it from `arithmetic` upwards (SPEC.md)."""

from reference.engine import Engine
from reference.model import load_model

__all__ = ["Engine", "load_model"]
