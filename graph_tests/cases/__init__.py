"""Suites of cases: a module ``NAME.py`` or ``NAME_part.py`` here is found by ``graph-tests run NAME``."""
