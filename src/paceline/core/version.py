"""The version of this package; pyproject.toml reads it here, so that a source tree that is not installed has one too."""

VERSION = "0.1.0"
