"""The web page at `/`: what a browser sees of the cache."""
