"""The slower memory, and the copies that are made to it and back beside the computation."""
