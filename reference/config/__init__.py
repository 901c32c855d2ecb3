"""What a configuration says of a model, read key by key (SPEC 10.3)."""

from reference.config.model import ModelConfig, SparseConfig, parse_config
from reference.config.rope import parse_rope
from reference.config.section import Section, show

__all__ = ["ModelConfig", "Section", "SparseConfig", "parse_config", "parse_rope", "show"]
