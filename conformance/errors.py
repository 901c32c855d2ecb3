"""What can go wrong with a suite run that is not a failed case."""

from reference.errors import BitforbitError


class GoldenError(BitforbitError):
    """A golden is missing, altered or unreadable."""


class BackendError(BitforbitError):
    """A backend cannot be found or imported, or declares nonsense."""


class CrewError(BitforbitError):
    """Workers gave different answers, or one was lost."""
