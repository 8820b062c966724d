"""What a checkpoint folder holds, read without torch."""
