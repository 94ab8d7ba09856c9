"""What the daemon works out before it starts anything."""

from __future__ import annotations

import pytest

from onebitd.surfaces.daemon import descriptors_wanted


@pytest.mark.parametrize(("connections", "wanted"), [(1, 162), (512, 1184), (10_000, 20_160)])
def test_descriptors_wanted_are_those_of_every_listener_and_some_besides(
    connections: int, wanted: int
) -> None:
    """Two for a public connection; 64 of the control socket, 32 scrapers, 64 for all the rest."""
    assert descriptors_wanted(connections) == wanted
