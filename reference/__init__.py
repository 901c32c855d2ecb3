"""The executable specification of LLM inference: read it from `arithmetic` upwards (SPEC.md)."""
