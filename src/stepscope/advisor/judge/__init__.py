"""Referee of two training scripts: is the changed one faster at the same training?"""
