"""Conversations: the tree of turns, exact token ids, prompt building, event logs and the Redis store."""
