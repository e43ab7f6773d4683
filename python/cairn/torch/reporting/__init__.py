"""Reports of plans, block by block, as text and as data."""
