"""Carries a schedule out: takes the model over, and follows the list of operations through a step."""
