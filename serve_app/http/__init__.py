"""The HTTP server: connections, limits, TLS, and the endpoints' outer form."""
