"""Tables of docs pages, rendered from the raw figures under bench/results."""
