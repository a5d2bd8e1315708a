"""The blocks of a paged cache as bytes, and their copies in host memory."""
