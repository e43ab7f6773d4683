"""Version of the Python package; it must be that of the C library (checked when the library is loaded)."""

__version__ = "0.1.0"
