"""The proposers, one file a method."""
