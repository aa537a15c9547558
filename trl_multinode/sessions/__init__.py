"""Agents that own their loop: they run beside training, call the engines over HTTP, and their calls become rows."""
