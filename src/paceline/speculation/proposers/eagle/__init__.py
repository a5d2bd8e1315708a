"""The proposer of EAGLE heads."""
