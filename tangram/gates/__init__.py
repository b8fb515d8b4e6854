"""Gates of the scorer `fastkvzip` that ship."""
