"""The errors that bitforbit raises: each says what was wrong, where, and what to do."""


class BitforbitError(Exception):
    """Base of every error that is ours. Its text is one line, fit for the command line."""


class PlatformError(BitforbitError):
    """This machine's floating point does not do what the specification needs."""


class QuantizationError(BitforbitError):
    """A tensor cannot be represented in the asked quantized format."""


class ConfigError(BitforbitError):
    """A configuration lacks a key, contradicts itself, or asks for what is not supported."""


class WeightsError(BitforbitError):
    """A weight file is missing, truncated or altered, or does not fit its configuration."""


class TokenizerError(BitforbitError):
    """A tokenizer is missing, unreadable, or does not belong to the model."""


class RequestError(BitforbitError):
    """A request cannot be computed: tokens out of range, empty or too long, or a bad option."""


class CacheError(BitforbitError):
    """The KV cache has no room or no longer holds what is asked, or a cache file is unfit."""
