"""A package, because tests/unit has files of the same names."""
