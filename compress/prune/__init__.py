"""Structured pruning: attention heads, feed-forward channels and whole layers."""
