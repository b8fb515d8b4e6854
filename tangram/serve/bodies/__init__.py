"""Parts of request bodies: strict fields, tools and JSON schemas, and fields that are refused."""
