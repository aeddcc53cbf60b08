"""Which packages are here."""

from __future__ import annotations

from importlib import metadata


def installed_version(distribution: str) -> str | None:
    """Return the version of a package that is installed; None for one that is not, or stands on the path alone."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
