"""HTTP below the endpoints: sockets, the protocol, its bounds, JSON in and errors out."""
