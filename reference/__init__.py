"""The executable specification of LLM inference: read it from `arithmetic` upwards (SPEC.md).

>>> from reference import Engine, load_model
>>> model = load_model("fixtures/tiny-dense")
>>> result = Engine(model).generate("In the beginning", max_new_tokens=8)
"""

from reference.engine import Engine
from reference.model import load_model

__all__ = ["Engine", "load_model"]
