"""The planted study again, with a process of its own for every case."""

from __future__ import annotations

from planted_study import Planted


class PlantedFresh(Planted):
    name = "planted-fresh"
    fresh_process = True


STUDY = PlantedFresh()
