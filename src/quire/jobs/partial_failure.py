"""What an attempt could not reach: it goes on with the rest, and fails at its end.

One bucket that is gone, or one file that cannot be removed, must not keep a job over many artifacts from the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.core.errors import AccessDenied, QuireError, Unavailable
from quire.core.ids import ArtifactKey
from quire.jobs.locations import Place


@dataclass(slots=True)
class Trouble:
    """The artifacts and object stores that one attempt leaves alone."""

    keys: set[ArtifactKey] = field(default_factory=set)
    urls: set[str] = field(default_factory=set)
    first: QuireError | None = None

    def add(self, place: Place, error: QuireError) -> None:
        """Leave this artifact alone; and its object store, if it is that which cannot be reached."""
        self.first = self.first or error
        self.keys.add(place.key)
        if isinstance(error, (Unavailable, AccessDenied)):
            self.urls.add(place.url)

    def spares(self, place: Place) -> bool:
        """Whether to leave an artifact alone."""
        return place.key in self.keys or (place.may_have_remote and place.url in self.urls)

    def settle(self) -> None:
        """At the end of the attempt: fail with the first error, if there was one."""
        if self.first is not None:
            raise self.first
