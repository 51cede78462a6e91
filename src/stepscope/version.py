"""The version, for modules that must not import the package itself."""

__version__ = "0.2.0"
