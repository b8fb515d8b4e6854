"""An answer from the events of the engine to a client."""
