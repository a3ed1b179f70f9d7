"""The card decides: which path serves how many tokens, measured where it runs.

``table.py`` has what was measured and what follows from it, ``search.py`` which counts are worth measuring, ``measuring.py`` the
clock, ``store.py`` what is kept on disk, ``deciding.py`` when a server measures and whose word counts: the setting, what is
stored, a measurement, the default.
"""
