"""What plans do, block by block, for people and as data."""
