"""Measures the first steps of training under a plan, and reports those over their budget."""
