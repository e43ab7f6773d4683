"""What a block reads and leaves beside its arguments and its result: taken down, compared, and put back."""
