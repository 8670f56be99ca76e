"""Measurements: what a turn costs, for us and for any OpenAI-compatible server beside us."""
