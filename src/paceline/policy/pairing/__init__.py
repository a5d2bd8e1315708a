"""Which draft worker serves which target worker, and what it prepares in advance."""
