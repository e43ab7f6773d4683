"""Watches the first steps of training under a plan, and tells of those over their budget."""
