"""The tiers to which values are offloaded, and asynchronous copies to them and back."""
