"""What the tests of the contracts share."""
