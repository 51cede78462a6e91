"""The planted study with a fresh process for every case."""

from __future__ import annotations

from planted_study import Planted


class PlantedFresh(Planted):
    name = "planted-fresh"
    fresh_process = True


STUDY = PlantedFresh()
