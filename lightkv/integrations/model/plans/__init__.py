"""What is known of transformers' decoder layers, and how it is compared with their own code."""
