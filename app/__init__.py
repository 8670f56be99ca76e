"""The front door: Starlette app, websocket connections, wire dialects, auth, CLI, config and the page."""
