"""The draft protocol: the proposer `pool` of a target worker, and the draft worker that answers it."""
