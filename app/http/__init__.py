"""The HTTP side of the API: one module a resource."""
