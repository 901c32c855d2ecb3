"""The errors that bitforbit raises: each says what is wrong, where, and what to do about it."""


def reason(error: Exception) -> str:
    """Why a file could not be read or written, for a message that names the file itself."""
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(told.split())


class BitforbitError(Exception):
    """Base class of all of them. The text is a single line, fit for the command line."""


class PlatformError(BitforbitError):
    """This machine's floating point does not do what the specification needs."""


class QuantizationError(BitforbitError):
    """A tensor cannot be represented in the quantized format that was asked for."""


class ConfigError(BitforbitError):
    """A configuration lacks a key, contradicts itself, or asks for something unsupported."""


class WeightsError(BitforbitError):
    """A weight file is missing, truncated or altered, or does not fit its configuration."""


class TokenizerError(BitforbitError):
    """A tokenizer is missing, unreadable, or does not belong to the model."""


class RequestError(BitforbitError):
    """A request cannot be computed: tokens out of range, empty or too long, or a bad option."""


class CacheError(BitforbitError):
    """The KV cache has no room or no longer holds what is needed, or a cache file is unusable."""
