"""Decisions: the chain problem of a profile, plans that solve it, plans by shape, estimates."""
