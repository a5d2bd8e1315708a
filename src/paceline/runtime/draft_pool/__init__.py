"""The proposer `pool`: a target worker's connections to draft workers."""
